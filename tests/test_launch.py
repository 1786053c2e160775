"""What the launcher says, and that it leaves nothing behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner

from app import launch

STUBBORN = """#!{python}
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", os.getpid(), flush=True)
time.sleep(600)
"""
LAUNCH = """
import sys
from pathlib import Path
import typer
from app import launch

launch._STOP_WITHIN_S = 1.0
sys.executable = sys.argv[1]
try:
    launch.main(Path(sys.argv[2]))
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


def write_config(folder, port, **more):
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, **more}))
    return config


def test_a_port_in_use_is_one_clear_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(typer.Exit) as ended:
            launch.main(write_config(tmp_path, port))
    assert ended.value.exit_code == 1
    assert f"http://127.0.0.1:{port} is in use" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"moodes": ["fp16"]}, "moodes"),
        ({"modes": ["fp32"]}, "'fp32' is unknown"),
        ({"engine_defaults": {"gpu_memory_utilization": 0.6}}, "sum (at most 1)"),
        ({"preset": "a100-40gb", "engine_defaults": {"num_gpus": 0.6}}, "sum (at most 1)"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch, args, said):
    monkeypatch.setattr(launch.subprocess, "Popen", None)
    applications = [{"name": "modeswitch", "import_path": "app.main:build", "args": args}]
    with pytest.raises(typer.Exit) as ended:
        launch.main(write_config(tmp_path, 1, applications=applications))
    assert ended.value.exit_code == 1
    assert said in capsys.readouterr().out


def test_what_only_one_kind_of_device_serves_is_not_refused():
    served = {"preset": "auto", "engines": {"speculative": {"num_cpus": 0.5}}}
    assert launch._refusal({"applications": [{"import_path": "app.main:build", "args": served}]}) is None
    assert launch._refusal({"applications": [{"import_path": "another:app"}]}) is None


@pytest.fixture
def launched(tmp_path):
    """The launcher over a `serve` that does not listen to Ctrl-C, and the process of that."""
    serve = tmp_path / "serve"
    serve.write_text(STUBBORN.format(python=sys.executable))
    serve.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args = [sys.executable, "-c", LAUNCH, str(tmp_path / "python"), str(write_config(tmp_path, port))]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(launch.__file__).parents[1])}
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        up, pid = launcher.stdout.readline().split()
        assert up == "up"
        served = psutil.Process(int(pid))
        yield launcher, served
        for process in (launcher, served):
            with contextlib.suppress(psutil.Error):
                process.kill()


def test_an_impatient_second_interrupt_leaves_nothing_behind(launched):
    launcher, served = launched
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline().strip() == "stopping"
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 0
    assert not served.is_running()


def test_a_killed_launcher_takes_serve_with_it(launched):
    launcher, served = launched
    launcher.kill()
    _, alive = psutil.wait_procs([served], timeout=20)
    # Where nobody waits for orphans, what is left of it is a zombie.
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


class Application:
    """Answers as the application does while its engines come up, one answer of `rounds` after another."""

    def __init__(self, rounds, keyed=False):
        self.rounds = list(rounds)
        self.keyed = keyed
        self.asked = []
        played = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self):
                played.asked.append(self.path)
                if self.path == "/health/ready" and len(played.rounds) > 1:
                    played.rounds.pop(0)
                states = played.rounds[0]
                self.send_response(200 if "ready" in states.values() else 503)
                self.end_headers()
                self.wfile.write(json.dumps(played.answer(self.path, states)).encode())

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path, states):
        if path == "/health/ready":
            return {"engines": states}
        if self.keyed:
            return {"error": {"message": "an API key is needed", "code": "invalid_api_key"}}
        engines = [
            {"name": name, "state": state, "reason": "too [little] memory" if state == "failed" else None}
            for name, state in states.items()
        ]
        modes = [("fp16", "fp16"), ("prefix_caching", "fp16"), ("int8", "int8")]
        return {"engines": engines, "data": [{"id": mode, "engine": engine} for mode, engine in modes]}


def test_modes_are_named_as_they_become_ready_and_the_times_can_be_recorded(monkeypatch, capsys):
    monkeypatch.setattr(launch, "_LOOK_EVERY_S", 0.01)
    steps = [("starting", "queued"), ("ready", "starting"), ("ready", "starting"), ("ready", "failed")]
    application = Application([{}, *({"fp16": fp16, "int8": int8} for fp16, int8 in steps)])
    launch._follow(application.url, SimpleNamespace(poll=lambda: None))
    application.server.shutdown()
    *lines, last = capsys.readouterr().out.strip().splitlines()
    said = [line.partition(" s] ")[2] for line in lines if line.startswith("[")]
    assert said == [
        "fp16 is starting",
        "int8 is queued",
        "fp16 is ready and serves fp16, prefix_caching",
        "int8 is starting",
        "int8 is failed: too [little] memory",
    ]
    times = json.loads(last)
    assert 0 <= times["first_engine_s"] <= times["all_engines_s"]
    assert times["failed"] == ["int8"]
    # The engines are asked when there is news, and not each time.
    assert application.asked.count("/v1/modes") == 3
    assert any("curl" in line for line in lines)


def test_where_keys_are_on_the_line_to_try_has_a_place_for_one(monkeypatch, capsys):
    monkeypatch.setattr(launch, "_LOOK_EVERY_S", 0.01)
    application = Application([{"fp16": "ready"}], keyed=True)
    launch._follow(application.url, SimpleNamespace(poll=lambda: None))
    application.server.shutdown()
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("curl"))
    assert '-H "Authorization: Bearer $KEY"' in line
    assert not any("started in" in line for line in lines)


def test_a_config_file_that_is_not_there_is_one_clear_line():
    command = typer.Typer()
    command.command()(launch.main)
    result = CliRunner().invoke(command, ["no/such/config.yaml"])
    assert result.exit_code == 2
    assert "does not exist" in result.output.replace("\n", " ")
