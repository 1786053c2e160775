"""Files that policies decide by: taken when they fit, refused with the reason when they do not."""

import json
import sys

import pytest

from app.config import KnowledgeSettings
from app.controller import knowledge
from app.controller.knowledge import read_knowledge
from tests.routing.conftest import profile_content


@pytest.fixture
def profile(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_content()))
    return file


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(knowledge, "_shipped", lambda: sorted(folder.glob("*.json")))
    return folder


def read(profile="auto", **settings):
    return read_knowledge(KnowledgeSettings(profile=profile, **settings), "tiny", "box")


def test_a_profile_that_fits_is_taken(profile):
    found = read(str(profile))
    assert (found.profile.version, found.refused) == ("p1", ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"hardware": "other"}, "measured for hardware 'other'"), ({"model": "other"}, "measured for model 'other'"),
     ({"schema_version": 9}, "malformed at schema_version"), ({"modes": {}}, "malformed at modes")],
)  # fmt: skip
def test_a_profile_that_does_not_fit_is_refused_with_the_reason(tmp_path, change, reason):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_content(**change)))
    found = read(str(file))
    assert found.profile is None
    assert reason in found.refused[0]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\xff"])
def test_what_is_no_profile_is_refused(tmp_path, content):
    file = tmp_path / "profile.json"
    file.write_bytes(content.encode("latin-1"))
    assert "malformed" in read(str(file)).refused[0]


def test_a_missing_file_is_said(tmp_path):
    assert "cannot be read" in read(str(tmp_path / "none.json")).refused[0]


def test_of_the_shipped_ones_the_one_that_fits_is_taken(shipped):
    assert "No profile comes with" in read().refused[0]
    (shipped / "a.json").write_text(json.dumps(profile_content(hardware="other")))
    assert "'other'" in read().refused[0]
    (shipped / "b.json").write_text(json.dumps(profile_content()))
    assert (read().profile.version, read().refused) == ("p1", ())


def test_none_is_nothing(shipped):
    assert read(None) == knowledge.Knowledge("tiny", "box")


def test_the_operator_may_vouch_for_the_hardware(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_content(hardware="other")))
    assert read(str(file), hardware="other").profile is not None


def test_without_the_runtime_a_trained_model_is_refused_and_the_profile_is_taken(profile, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = read(str(profile), trained_model=profile)
    assert (found.profile.version, found.predictor) == ("p1", None)
    (why,) = found.refused
    assert "cannot be used" in why
    assert "pip install 'modeswitch[learned]'" in why


def test_a_trained_model_that_is_none_is_refused(tmp_path):
    file = tmp_path / "model.onnx"
    assert "cannot be used" in read(None, trained_model=file).refused[0]
    file.write_bytes(b"no model")
    assert "cannot be used" in read(None, trained_model=file).refused[0]
