"""Files that policies decide by: taken when they fit, refused with the reason when they do not."""

import json
import sys

import pytest

from app.config import KnowledgeSettings, load_settings
from app.controller import knowledge
from app.controller.knowledge import read_knowledge
from app.routing.profile import parse_profile
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


@pytest.mark.parametrize("file", knowledge._shipped(), ids=lambda file: file.stem)
def test_a_shipped_profile_is_complete(file):
    """For every mode of the CPU preset costs, and for every lossy one its quality with what it rests on."""
    content = json.loads(file.read_text())
    profile = parse_profile(content, model="embedded", hardware=content["hardware"])
    settings = load_settings({"preset": "cpu"})
    modes = {mode.name: mode for mode in settings.resolved_modes}
    engines = {spec.name for spec in settings.engine_specs}
    assert profile.modes.keys() == modes.keys()
    for mode in profile.modes.values():
        assert mode.prefill_j
        assert mode.decode_j_per_token
        assert mode.peak_memory_bytes
        assert len(mode.step_ms) > 1
    assert {name: set(others) for name, others in profile.interference.items()} == {
        engine: engines - {engine} for engine in engines
    }
    assert {evidence.mode for evidence in profile.quality} == {
        name for name, mode in modes.items() if not mode.lossless
    }
    for evidence in profile.quality:
        assert evidence.samples > 0
        assert evidence.low <= evidence.delta <= evidence.high


def test_a_profile_is_shipped():
    assert knowledge._shipped()


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
