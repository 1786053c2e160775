import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import psutil
import pytest
import yaml
from aiohttp import web

from loadgen.null_server import make_app
from loadgen.overhead_report import compare, metrics_of
from loadgen.overhead_trials import APP, BARE, CONTROL, Rounds, Trial, TrialFailed, orders, read_trial
from loadgen.records import Outcome, RequestRecord, read_records
from loadgen.servers import StartFailed, one_mode_config
from tests.loadgen.conftest import API_KEY, finished, keyed, lines_in, serve

LOADGEN = [sys.executable, "-m", "loadgen"]


def trial(tokens_per_s: float, ttft_ms: float = 100.0) -> Trial:
    return Trial(tokens_per_s, ttft_ms, frame_gap_p95_ms=50.0, frames_per_token=1.0)


def test_every_series_is_equally_often_in_every_place() -> None:
    seen = list(islice(orders(), 6))
    for place in range(3):
        assert sorted(order[place] for order in seen) == sorted([APP, BARE, CONTROL] * 2)
    assert len(set(seen)) == 6


def test_a_known_loss_is_found_whatever_the_drift() -> None:
    rounds = Rounds()
    for drift in (1.0, 0.7, 1.3, 0.9, 1.1, 0.8):
        rounds.add(
            1,
            {APP: trial(18.0 * drift, 130), BARE: trial(20.0 * drift), CONTROL: trial(20.0 * drift)},
        )
    found = {item.metric.name: item for item in compare(rounds)}
    assert found["tokens/s, 1 stream"].against_bare.estimate == pytest.approx(0.9)
    assert found["tokens/s, 1 stream"].control.estimate == pytest.approx(1.0)
    assert found["tokens/s, 1 stream"].verdict == "missed"
    assert found["TTFT added, 1 stream (ms)"].against_bare.estimate == pytest.approx(30.0)
    assert found["P95 between frames, 1 stream"].verdict == "met"
    assert "tokens/s, 8 streams" not in found, "what has no complete round is not reported"
    assert json.dumps([item.as_json() for item in found.values()])


def test_an_interval_that_holds_the_target_decides_nothing() -> None:
    rounds = Rounds()
    for app in (0.90, 1.02, 0.91, 1.03):
        rounds.add(1, {APP: trial(app), BARE: trial(1.0), CONTROL: trial(1.0)})
    item = compare(rounds)[0]
    assert item.verdict == "met, within noise"


def test_a_trial_is_read_from_all_its_streams() -> None:
    records = [
        RequestRecord(frame_ms=[100.0, 120.0, 140.0], ttft_ms=100.0, output_tokens=6),
        RequestRecord(frame_ms=[200.0, 210.0, 220.0], ttft_ms=200.0, output_tokens=6),
    ]
    found = read_trial(records, wall_s=2.0, series=APP)
    assert (found.tokens_per_s, found.ttft_ms, found.frames_per_token) == (6.0, 150.0, 0.5)
    assert found.frame_gap_p95_ms == 20.0


def test_a_failed_request_spoils_its_trial() -> None:
    with pytest.raises(TrialFailed, match="bare: dropped: gone"):
        read_trial([RequestRecord(outcome=Outcome.DROPPED, error="gone")], 1.0, BARE)
    with pytest.raises(TrialFailed, match="1 frames"):
        read_trial([RequestRecord(frame_ms=[1.0], ttft_ms=1.0, output_tokens=5)], 1.0, BARE)


def test_the_application_is_started_with_the_one_mode(tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_text("applications:\n- name: m\n  import_path: app.main:build\n  args: {preset: auto}\n")
    copy = yaml.safe_load(one_mode_config(config, "int8", tmp_path).read_text())
    assert copy["applications"][0]["args"] == {
        "preset": "auto",
        "modes": ["int8"],
        "live": {"policy": "static:int8"},
    }
    config.write_text("applications: []")
    with pytest.raises(StartFailed, match="no usable Serve config"):
        one_mode_config(config, "int8", tmp_path)


async def application(model_folder: Path, *, asks_for_key: bool = False) -> str:
    """A null server that describes an engine as this application does."""
    app = make_app(tokens_per_s=500.0)
    engine = {"name": "fp16", "state": "ready", "engine_args": {"model": str(model_folder)}, "env": {"A": "1"}}

    async def modes(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fp16", "engine": "fp16", "state": "ready"}], "engines": [engine]})

    app.router.add_get("/v1/modes", modes)
    return str((await serve(keyed(app) if asks_for_key else app)).make_url(""))


@contextmanager
def overhead(url: str, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    command = [*LOADGEN, "overhead", "--base-url", url, "--out", str(out), "--settle-s", "0", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


async def test_against_two_null_servers(model_folder: Path, tmp_path: Path) -> None:
    url = await application(model_folder, asks_for_key=True)
    bare = " ".join([*LOADGEN, "null-server", "--tokens-per-s", "500"])
    more = (
        "--rounds",
        "2",
        "--streams",
        "1",
        "--streams",
        "3",
        "--bare-command",
        bare,
        "--output-tokens",
        "8",
        "--api-key",
        API_KEY,
    )
    with overhead(url, tmp_path, *more) as process:
        words = await finished(process)
    assert process.returncode == 0, words
    assert API_KEY not in (tmp_path / "overhead.json").read_text()
    summary = json.loads((tmp_path / "overhead.json").read_text())
    assert summary["rounds"] == 2
    asked = {metric.name for count in (1, 3) for metric in metrics_of(count)}
    assert {item["metric"] for item in summary["comparisons"]} == asked
    assert summary["engine"]["env"] == {"A": "1"}
    assert len(read_records(tmp_path / "requests.jsonl").records) == (2 + 1) * 3 * (1 + 3)
    port = summary["bare_command"][-1]
    assert not [item for item in psutil.process_iter(["cmdline"]) if port in (item.info["cmdline"] or ())]


async def test_interrupted_it_reports_what_it_has_and_ends_its_server(model_folder: Path, tmp_path: Path) -> None:
    url = await application(model_folder)
    bare = " ".join([*LOADGEN, "null-server", "--tokens-per-s", "500"])
    with overhead(url, tmp_path, "--rounds", "100000", "--bare-command", bare, "--output-tokens", "4") as process:
        await lines_in(tmp_path / "requests.jsonl", 60)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        words = await finished(process)
    assert process.returncode == 130, words
    summary = json.loads((tmp_path / "overhead.json").read_text())
    assert summary["interrupted"] is True
    assert summary["rounds"] >= 1
    assert children
    assert not [child for child in children if child.is_running()]


async def test_a_server_that_cannot_start_is_named_with_its_last_words(model_folder: Path, tmp_path: Path) -> None:
    url = await application(model_folder)
    with overhead(url, tmp_path, "--bare-command", f"{sys.executable} -c 'raise OSError(42)'") as process:
        words = await finished(process)
    assert process.returncode == 2
    assert "OSError: 42" in words
    assert "Traceback" not in words.split("OSError")[0] or "ended with status" in words
