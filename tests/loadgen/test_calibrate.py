import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.routing.profile import Profile, parse_profile
from app.routing.settings import RoutingSettings
from loadgen.calibration_profile import CalibrationFailed, read_quality
from loadgen.calibration_trials import steady_window_ms, token_ms
from loadgen.records import OutputUnwritable, RequestRecord, read_records, require_writable
from loadgen.served_modes import read_served, read_settings
from loadgen.server_facts import NothingServed
from tests.loadgen.conftest import API_KEY, finished, keyed, serve
from tests.loadgen.fake_modes import FakeApplication, four_engines


@contextmanager
def calibrate(url: str, model_folder: Path, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", "calibrate", "--base-url", url, "--out", str(out)]
    command += ["--tokenizer", str(model_folder), "--results", str(out.parent / "results"), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def read(path: Path) -> Profile:
    return parse_profile(path.read_text(), model="tiny-model", hardware="box")


async def test_a_server_of_known_speed_is_recovered(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(keyed(FakeApplication(four_engines(), energy=True).app()))).make_url(""))
    more = ("--budget-s", "25", "--api-key", API_KEY)
    with calibrate(url, model_folder, tmp_path / "profile.json", *more) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    profile = read(tmp_path / "profile.json")
    assert set(profile.modes) == {"fp16", "prefix_caching", "int8", "speculative"}
    assert profile.modes["fp16"] == profile.modes["prefix_caching"], "one engine, one set of coefficients"
    fp16, int8, speculative = (profile.modes[name] for name in ("fp16", "int8", "speculative"))
    # Sleeps are never too short, and too long on a busy machine.
    for tokens, took_ms in fp16.prefill_ms:
        assert 0.75 < took_ms / (20.0 + 0.1 * tokens) < 2.0
    for batch, step_ms in fp16.step_ms:
        assert 0.9 < step_ms / (12.0 + batch) < 1.6
    assert int8.prefill_ms[-1][1] < fp16.prefill_ms[-1][1]
    assert speculative.speculation is not None
    assert speculative.speculation.accepted_per_step["rewriting"] == pytest.approx(2.0, abs=0.25)
    assert speculative.speculation.default == 0.0
    assert 0.9 < speculative.step_ms[0][1] / 15.0 < 1.6
    assert profile.interference["fp16"]["int8"] == pytest.approx(1.5, abs=0.3)
    assert set(profile.interference["int8"]) == {"fp16", "speculative"}
    assert fp16.peak_memory_bytes == 1004
    assert fp16.decode_j_per_token is not None
    assert fp16.decode_j_per_token[0][1] == pytest.approx(0.5, abs=0.05)
    assert int8.decode_j_per_token is None, "its server tells no energy, and unknown is not 0"
    (evidence,) = profile.quality
    assert (evidence.mode, evidence.scope, evidence.outcome) == ("int8", "none", "pass")
    said = " ".join(words.split())
    assert "routing by cost is predicted to take" in said
    assert "does not tell its routing settings" in said
    records, damaged = read_records(tmp_path / "results" / "requests.jsonl")
    assert damaged == 0
    assert {record.workload.rpartition(": ")[2].split()[0] for record in records} == {
        "warm-up",
        "prefill",
        "step",
        "together",
    }
    assert (tmp_path / "results" / "texts.jsonl").read_text().count('"mode":"int8"') == 24
    assert json.loads((tmp_path / "results" / "summary.json").read_text())["version"] == profile.version


async def test_an_interrupted_calibration_writes_what_it_has(model_folder: Path, tmp_path: Path) -> None:
    application = FakeApplication(four_engines())
    url = str((await serve(application.app())).make_url(""))
    with calibrate(url, model_folder, tmp_path / "profile.json", "--budget-s", "500") as process:
        while len(application.policies) < 150:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    assert process.returncode == 130, words
    assert "fp16" in read(tmp_path / "profile.json").modes


async def test_a_kill_loses_no_whole_round(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(FakeApplication(four_engines()).app())).make_url(""))
    with calibrate(url, model_folder, tmp_path / "profile.json", "--budget-s", "500") as process:
        while not (tmp_path / "profile.json").exists():
            await asyncio.sleep(0.05)
        process.kill()
        await finished(process)
    assert set(read(tmp_path / "profile.json").modes) == {"fp16", "prefix_caching", "int8", "speculative"}
    assert len(read_records(tmp_path / "results" / "requests.jsonl").records) > 20


@pytest.mark.parametrize("place", ["file/profile.json", "folder"])
async def test_what_cannot_be_written_is_said_before_anything_is_measured(
    model_folder: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    application = FakeApplication(four_engines())
    url = str((await serve(application.app())).make_url(""))
    with calibrate(url, model_folder, tmp_path / place, "--results", str(tmp_path / "results")) as process:
        words = await finished(process)
    assert process.returncode == 2, words
    assert "cannot write" in words
    assert application.policies == []


def test_looking_whether_a_file_can_be_written_leaves_it_alone(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "profile.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    require_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    with pytest.raises(OutputUnwritable, match="cannot write /proc/nowhere"):
        require_writable(Path("/proc/nowhere/profile.json"))


def test_the_answer_is_for_the_settings_that_the_server_tells() -> None:
    mine = RoutingSettings(accepted_modes=frozenset({"gptq"}))
    assert read_settings({"routing": {"settings": mine.model_dump(mode="json")}}) == (mine, None)
    assert read_settings({"routing": {"settings_version": RoutingSettings().version}}) == (RoutingSettings(), None)
    for routing in ({"settings_version": mine.version}, {}, None, {"settings": {"odd": 1}}):
        settings, why = read_settings({"routing": routing})
        assert settings == RoutingSettings()
        assert why is not None
        assert "supposes the defaults" in why


async def test_a_server_without_modes_is_told_what_measures_it(
    model_folder: Path, null_url: str, tmp_path: Path
) -> None:
    with calibrate(null_url, model_folder, tmp_path / "profile.json") as process:
        words = await finished(process)
    assert process.returncode == 2, words
    assert "has no modes (GET /v1/modes)" in " ".join(words.split())


async def test_a_server_that_fails_is_an_error_and_no_profile(model_folder: Path, tmp_path: Path) -> None:
    url = str((await serve(FakeApplication(four_engines(), fail_after=1).app())).make_url(""))
    with calibrate(url, model_folder, tmp_path / "profile.json", "--budget-s", "20") as process:
        words = await finished(process)
    assert process.returncode == 2, words
    assert "overloaded" in words
    assert not (tmp_path / "profile.json").exists()


def test_frames_of_several_tokens_and_tokens_without_a_frame() -> None:
    # 9 tokens: one at 100 ms, then two a frame each 20 ms; the last two show no text.
    record = RequestRecord(sent_s=1.0, ttft_ms=100.0, frame_ms=[100.0, 120.0, 140.0, 160.0, 180.0], total_ms=180.0)
    record.output_tokens = 9
    assert token_ms(record, *steady_window_ms([record])) == pytest.approx(10.0)
    later = RequestRecord(sent_s=1.0, ttft_ms=140.0, frame_ms=[140.0, 300.0], total_ms=300.0, output_tokens=2)
    assert steady_window_ms([record, later]) == (1140.0, 1180.0)
    assert token_ms(record, 1140.0, 1180.0) == pytest.approx(10.0)
    assert token_ms(RequestRecord(output_tokens=1), 0.0, 1.0) is None


def test_names_come_from_the_server_or_the_user() -> None:
    mode = {"id": "fp16", "engine": "fp16", "state": "ready", "weights": "fp16", "lossless": True}
    served = read_served({"data": [mode], "model": "m", "engines": []}, None, "mine")
    assert (served.model, served.hardware) == ("m", "mine")
    with pytest.raises(NothingServed, match="give --hardware"):
        read_served({"data": [mode], "model": "m", "engines": []}, None, None)
    with pytest.raises(NothingServed, match="no mode that is ready"):
        read_served({"data": [{**mode, "state": "starting"}]}, "m", "h")


def test_bad_quality_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    with pytest.raises(CalibrationFailed, match="cannot read"):
        read_quality(path)
    path.write_text(json.dumps([{"mode": "int8", "scope": "any", "outcome": "maybe", "metric": "kl"}]))
    with pytest.raises(CalibrationFailed, match="outcome"):
        read_quality(path)
    path.write_text(json.dumps([{"mode": "int8", "scope": "any", "outcome": "pass", "metric": "kl"}]))
    assert read_quality(path)[0].outcome == "pass"
