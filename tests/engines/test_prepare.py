"""Preparation as a user runs it: real processes, really killed.

Quantizing takes minutes, so the quantizing environment is replaced by a Python that is a script: it copies the weights
slowly and reports like the real one. Everything else (command, locks, folders, manifests, signals) is real.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from app.engines import store
from app.engines.checkpoints import quantize_env
from app.engines.checkpoints.home_lock import home_locked
from app.engines.store import CheckpointMissing, Scheme
from tests.engines.tiny_models import write_embedded_package, write_llama

PATIENCE_S = 180.0

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys, threading, time
def end_with_parent():
    while os.read(0, 4096):
        pass
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
dense, out, scheme, calibration = map(pathlib.Path, sys.argv[3:])
home = pathlib.Path(sys.argv[0]).parents[2]
assert len(json.loads(calibration.read_text())) == 64
with (home / "runs").open("a") as runs:
    runs.write(f"{{os.getpid()}}\\n")
if (home / "fail").exists():
    print("the model is too strange")
    sys.exit(3)
(out / "config.json").write_text((dense / "config.json").read_text())
weights = (dense / "model.safetensors").read_bytes()
with (out / "model.safetensors").open("wb", buffering=0) as file:
    file.write(weights[:1000])
    print("(1/2): Calibrating: 50%", end="\\r", flush=True)
    while (home / "slow").exists():
        time.sleep(0.02)
    file.write(weights[1000:])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    python = tmp_path / "home" / quantize_env.FOLDER_NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (python.parents[1] / quantize_env.STAMP_NAME).write_text(quantize_env.stamp())
    return tmp_path / "home"


def start(model: Path | str, home: Path, *more: str, path: Path | None = None) -> "subprocess.Popen[str]":
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "app.engines.prepare", "--model", str(model), "--home", str(home), *more]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts() -> None:
    """A shell starts what runs in the background, this test run maybe, with SIGINT ignored, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(model: Path | str, home: Path, *more: str, path: Path | None = None) -> tuple[int, str]:
    process = start(model, home, *more, path=path)
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def partial_folders(home: Path) -> list[Path]:
    return list(home.glob("checkpoints/*/.*"))


def quantizing_runs(home: Path) -> list[int]:
    return [int(line) for line in (home / "runs").read_text().splitlines()]


def test_a_prepared_checkpoint_is_served_and_kept(model: Path, home: Path) -> None:
    code, output = run(model, home, "--scheme", "fp16", "--scheme", "int8")
    assert code == 0, output
    folder = Path(store.model_path(str(model), "int8", home))
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert {"tokenizer_config.json", "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
    record = json.loads((folder / "manifest.json").read_text())
    assert record["scheme"] == "int8"
    assert record["source"] == str(model)
    assert record["versions"]["llmcompressor"] == "0.13.0"
    assert store.model_path(str(model), "fp16", home) == str(model)

    code, output = run(model, home, "--scheme", "int8")
    assert code == 0, output
    assert len(quantizing_runs(home)) == 1
    assert run(model, home, "--scheme", "int8", "--verify")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_nothing_taken_for_whole(model: Path, home: Path, number: signal.Signals) -> None:
    (home / "slow").touch()
    process = start(model, home, "--scheme", "gptq")
    wait_for(lambda: [f for p in partial_folders(home) for f in p.glob("*.safetensors") if f.stat().st_size])
    (child,) = quantizing_runs(home)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    with pytest.raises(CheckpointMissing):
        store.model_path(str(model), "gptq", home)
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    if number is not signal.SIGKILL:
        assert partial_folders(home) == []

    (home / "slow").unlink()
    code, output = run(model, home, "--scheme", "gptq")
    assert code == 0, output
    assert partial_folders(home) == []
    assert run(model, home, "--scheme", "gptq", "--verify")[0] == 0


def test_a_run_under_nohup_outlives_its_terminal(model: Path, home: Path) -> None:
    (home / "slow").touch()
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(model, home, "--scheme", "int8")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    wait_for(lambda: (home / "runs").exists())
    process.send_signal(signal.SIGHUP)
    (home / "slow").unlink()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert store.model_path(str(model), "int8", home)


def test_the_embedded_model_is_unpacked_after_a_kill(tmp_path: Path, home: Path) -> None:
    site = tmp_path / "site"
    write_embedded_package(site)
    process = start("embedded", home, "--scheme", "fp16", path=site)
    wait_for(lambda: partial_folders(home))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert partial_folders(home), "the kill came too late to show anything"
    with pytest.raises(CheckpointMissing):
        store.model_path("embedded", "fp16", home)

    code, output = run("embedded", home, "--scheme", "fp16", path=site)
    assert code == 0, output
    assert "an interrupted run had left" in output
    folder = Path(store.model_path("embedded", "fp16", home))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (folder / "chat_template.jinja").exists()
    assert (folder / "model.safetensors").stat().st_mode & 0o044, "others must be able to read the weights"
    assert partial_folders(home) == []


def flip_a_bit(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def delete_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, delete_manifest])
def test_a_damaged_checkpoint_is_found_and_rebuilt(model: Path, home: Path, damage: Callable[[Path], None]) -> None:
    assert run(model, home, "--scheme", "int8")[0] == 0
    folder = Path(store.model_path(str(model), "int8", home))
    damage(folder)
    code, output = run(model, home, "--scheme", "int8", "--verify")
    assert code == 1
    assert "corrupt" in output
    code, output = run(model, home, "--scheme", "int8")
    assert code == 0, output
    assert "rebuilding" in output
    assert len(quantizing_runs(home)) == 2
    assert run(model, home, "--scheme", "int8", "--verify")[0] == 0


def test_runs_exclude_each_other(model: Path, home: Path) -> None:
    (home / "slow").touch()
    first = start(model, home, "--scheme", "int8")
    wait_for(lambda: (home / "runs").exists())
    second = start(model, home, "--scheme", "int8")
    assert second.stdout is not None
    assert f"Waiting for another run (process {first.pid})" in second.stdout.readline()
    (home / "slow").unlink()
    for process in (first, second):
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    assert len(quantizing_runs(home)) == 1


def test_an_orphan_keeps_the_lock(tmp_path: Path) -> None:
    """A child such as pip outlives a killed parent; nobody may clear its folder away while it still writes."""
    with home_locked(tmp_path, lambda holder: None) as lock:
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    waited: list[str] = []

    def release(holder: str) -> None:
        waited.append(holder)
        orphan.communicate(b"\n")

    with home_locked(tmp_path, release):
        assert waited == [str(os.getpid())]


def test_a_changed_model_is_prepared_anew(model: Path, home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert run(copy, home, "--scheme", "int8")[0] == 0
    flip_a_bit(copy)
    code, output = run(copy, home, "--scheme", "int8")
    assert code == 0, output
    assert "has changed" in output
    folder = Path(store.model_path(str(copy), "int8", home))
    assert (folder / "model.safetensors").read_bytes() == (copy / "model.safetensors").read_bytes()


def test_a_failure_names_its_log_and_leaves_nothing(model: Path, home: Path) -> None:
    (home / "fail").touch()
    code, output = run(model, home, "--scheme", "awq")
    assert code == 1
    (log,) = (home / "logs").glob("*awq.log")
    assert str(log) in output
    assert "the model is too strange" in output
    assert "the model is too strange" in log.read_text()
    assert not store.checkpoint_folder(str(model), Scheme.AWQ, home).exists()
    assert partial_folders(home) == []


def test_quantized_weights_are_not_quantized_again(model: Path, home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    code, output = run(copy, home, "--scheme", "int8")
    assert code == 1
    assert "quantized already" in output


def test_with_no_network_the_way_out_is_named(home: Path) -> None:
    code, output = run("some-org/some-model", home, "--scheme", "int8")
    assert code == 1
    assert "embedded" in output
    assert "Traceback" not in output
