"""The store answers from the disk, and never takes a damaged checkpoint for a whole one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engines import store
from app.engines.checkpoints import manifest
from app.engines.store import CheckpointCorrupt, CheckpointMissing, Scheme

WEIGHTS = bytes(range(256)) * 8


def make_checkpoint(home: Path, reference: str = "embedded", scheme: Scheme = Scheme.INT8) -> Path:
    folder = store.checkpoint_folder(reference, scheme, home)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    seal(folder, scheme)
    return folder


def seal(folder: Path, scheme: Scheme) -> None:
    made = manifest.describe(folder, source="s", fingerprint="f", scheme=scheme, recipe="r", versions={"torch": "2"})
    manifest.write(made, folder)


def test_a_whole_checkpoint_is_found(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    assert store.model_path("embedded", "int8", tmp_path) == str(folder)
    assert manifest.check_checksums(folder) == manifest.read(folder)


def test_a_missing_checkpoint_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointMissing, match=r"python -m app\.engines\.prepare --model embedded --scheme gptq.*--home"
    ):
        store.model_path("embedded", "gptq", tmp_path)


def test_the_command_needs_no_home_in_the_default_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODESWITCH_HOME", str(tmp_path))
    with pytest.raises(CheckpointMissing) as caught:
        store.model_path("embedded", "fp16", store.default_home())
    assert "--home" not in str(caught.value)


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp4"):
        store.model_path("embedded", "fp4", tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(WEIGHTS[:-1]), "has 2047 bytes, 2048 expected"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {}}'), "cannot be read"),
    ],
)
def test_damage_is_refused_at_serving_time(tmp_path: Path, damage: object, reason: str) -> None:
    folder = make_checkpoint(tmp_path)
    assert callable(damage)
    damage(folder)
    with pytest.raises(CheckpointCorrupt, match=reason):
        store.model_path("embedded", "int8", tmp_path)


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, len(WEIGHTS) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_by_checksums(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    folder = make_checkpoint(tmp_path_factory.mktemp("home"))
    flipped = bytearray(WEIGHTS)
    flipped[position] ^= 1 << bit
    (folder / "model.safetensors").write_bytes(flipped)
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        manifest.check_checksums(folder)


def test_dense_weights_are_used_in_place(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert store.model_path(str(model), "fp16", tmp_path) == str(model)
    assert store.model_path("org/some-model", "fp16", tmp_path) == "org/some-model"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"no config\.json"):
        store.model_path(str(tmp_path), "fp16", tmp_path)


def test_the_configuration_may_name_ready_checkpoints(tmp_path: Path) -> None:
    checkpoints = {"awq": "org/some-model-awq"}
    assert store.resolve("org/some-model", "awq", checkpoints, tmp_path) == "org/some-model-awq"
    assert store.resolve("org/some-model", "fp16", checkpoints, tmp_path) == "org/some-model"
    with pytest.raises(CheckpointMissing):
        store.resolve("org/some-model", "int8", checkpoints, tmp_path)


def test_folders_of_one_name_do_not_share_checkpoints(tmp_path: Path) -> None:
    one = store.checkpoint_folder(str(tmp_path / "a" / "model"), Scheme.INT8, tmp_path)
    other = store.checkpoint_folder(str(tmp_path / "b" / "model"), Scheme.INT8, tmp_path)
    assert one != other


@pytest.mark.parametrize(
    ("reference", "is_hub"),
    [
        ("gpt2", True),
        ("org/model-1.5B", True),
        ("./model", False),
        ("/models/m", False),
        ("a/b/c", False),
        ("~/m", False),
    ],
)
def test_hub_names_are_told_from_folders(reference: str, is_hub: bool) -> None:
    assert store.is_hub_name(reference) is is_hub


@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"MODESWITCH_HOME": "/m", "XDG_CACHE_HOME": "/x"}, "/m"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/modeswitch"),
        ({"XDG_CACHE_HOME": "relative"}, "/h/.cache/modeswitch"),
        ({}, "/h/.cache/modeswitch"),
    ],
)
def test_default_home(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], home: str) -> None:
    monkeypatch.delenv("MODESWITCH_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/h")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.default_home() == Path(home)
