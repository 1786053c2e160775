import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.idle_cost import EarlierUnreadable, cpu_of, group
from loadgen.process_tree import ProcessCost, measure, start_group, stop_group, tree


def cost(pid: int, parent: int, name: str, pss: int | None = 10) -> ProcessCost:
    return ProcessCost(pid, parent, name, cpu_s_per_s=0.01, rss_bytes=20, pss_bytes=pss)


def test_an_engine_is_its_replica_and_all_below_it() -> None:
    costs = [
        cost(1, 0, "raylet"),
        cost(2, 1, "ray::ServeReplica:modeswitch:engine-fp16"),
        cost(3, 2, "VLLM::EngineCore"),
        cost(4, 3, "VLLM::Worker", pss=None),
        cost(5, 1, "ray::ServeReplica:modeswitch:engine-int8"),
        cost(6, 5, "VLLM::EngineCore"),
        cost(7, 1, "ray::ProxyActor"),
    ]
    fp16, int8, rest = group(costs)
    assert (fp16.name, fp16.processes, fp16.pss_bytes) == ("modeswitch:engine-fp16", 3, None)
    assert fp16.rss_bytes == 60
    assert (int8.name, int8.processes, int8.pss_bytes) == ("modeswitch:engine-int8", 2, 20)
    assert (rest.processes, rest.cpu_s_per_s) == (2, pytest.approx(0.02))


def test_a_process_that_computes_costs_and_one_that_is_gone_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        busy_cost = next(item for item in measure([busy.pid], 0.3) if item.pid == busy.pid)
        busy.kill()
    assert busy_cost.cpu_s_per_s > 0
    assert busy_cost.rss_bytes > 0
    assert measure([busy.pid], 0.0) == []


def test_a_tree_is_ended_to_the_last_grandchild(tmp_path: Path) -> None:
    # The grandchild ignores every polite signal and has a session of its own, as some workers do.
    stubborn = (
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)];"
        "print('up', flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    process = start_group([sys.executable, "-c", parent], dict(os.environ), tmp_path / "log")
    while b"up" not in (tmp_path / "log").read_bytes():
        pass
    members = tree([process.pid])
    assert len(members) == 2
    stop_group(process, grace_s=0.4)
    assert not [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


def test_the_command_reports_and_subtracts(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"total": {"cpu_s_per_s": 0.5}}))
    watched = ["--seconds", "0.1", "--pid", str(os.getpid()), "--minus", str(empty)]
    result = CliRunner().invoke(make_app(), ["idle-cost", *watched, "--out", str(tmp_path / "idle.json")])
    assert result.exit_code == 0, result.output
    assert "of one core" in result.output
    found = json.loads((tmp_path / "idle.json").read_text())
    assert os.getpid() in {item["pid"] for item in found["processes"]}
    assert cpu_of(tmp_path / "idle.json") == found["total"]["cpu_s_per_s"]


def test_nothing_to_watch_and_nothing_to_subtract(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    result = CliRunner().invoke(make_app(), ["idle-cost", "--seconds", "0.1", "--pid", str(gone.pid)])
    assert (result.exit_code, "no process to watch" in result.output) == (2, True)
    with pytest.raises(EarlierUnreadable, match="missing"):
        cpu_of(tmp_path / "missing.json")


def test_the_empty_application_is_not_measured_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.idle_cost.ray_processes", lambda: [os.getpid()])
    result = CliRunner().invoke(make_app(), ["idle-cost", "--seconds", "0.1", "--empty"])
    assert (result.exit_code, "stop it first" in result.output) == (2, True)


def test_an_empty_application_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve = tmp_path / "serve"
    serve.write_text("#!/bin/sh\ntest -s $2 && echo no such cluster >&2\nexit 3\n")
    serve.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("loadgen.idle_cost.ray_processes", list)
    result = CliRunner().invoke(make_app(), ["idle-cost", "--seconds", "0.1", "--empty"])
    assert result.exit_code == 2
    assert "status 3" in result.output
    assert "no such cluster" in result.output


@pytest.mark.timeout(30)
def test_what_cannot_be_written_is_said_before_watching(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watched = ["--seconds", "600", "--pid", str(os.getpid()), "--out", str(tmp_path / "file" / "idle.json")]
    result = CliRunner().invoke(make_app(), ["idle-cost", *watched])
    assert (result.exit_code, "cannot write" in result.output) == (2, True)
