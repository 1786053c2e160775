"""One running application with real engines, shared by all engine tests."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
import yaml
from openai import OpenAI

from app.config import load_settings

SERVED = "smollm2-135m-instruct"
PORT = 8123
START_WITHIN_S = 900

CONFIG: dict = {
    "http_options": {"host": "127.0.0.1", "port": PORT},
    "logging_config": {"enable_access_log": False},
    "applications": [
        {
            "name": "modeswitch",
            "route_prefix": "/",
            "import_path": "app.main:build",
            "args": {
                "preset": "cpu",
                # One engine more than the preset, which cannot start: its cache is too small for one prompt.
                "modes": [
                    *load_settings({"preset": "cpu"}).modes,
                    {"name": "broken", "of": ["fp16"], "engine_args": {"kv_cache_memory_bytes": 1_000_000}},
                ],
                "restart": {"first_s": 3600, "longest_s": 3600},
            },
        }
    ],
}


@dataclass
class Application:
    """The application as its users see it, and its processes as an operator does."""

    url: str
    process: subprocess.Popen
    config: dict
    folder: Path

    @property
    def ledger(self):
        return self.folder / "ledger.sqlite"

    def deploy(self, **live):
        """Change the controller's live settings, as an operator does."""
        config = copy.deepcopy(self.config)
        config["applications"][0]["deployments"] = [{"name": "controller", "user_config": live}]
        file = self.folder / "deployed.yaml"
        file.write_text(yaml.safe_dump(config))
        # A local Ray cluster protects its dashboard with a token, which its own commands find when told to look.
        subprocess.run(
            [str(Path(sys.executable).with_name("serve")), "deploy", "-a", "http://127.0.0.1:8265", str(file)],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            timeout=120,
            check=True,
        )

    def wait_until(self, condition, within_s):
        """The first true value of `condition()`; fails the test when there is none in time."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.2)
        return found

    def chat(self, mode, content, **options):
        body = {"model": f"{SERVED}:{mode}", "messages": [{"role": "user", "content": content}], **options}
        return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=900)

    def overview(self):
        return requests.get(f"{self.url}/v1/modes", timeout=60).json()

    def engine(self, name):
        return next(engine for engine in self.overview()["engines"] if engine["name"] == name)

    def openai(self):
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def wait_for(self, name, condition, within_s):
        """The engine's entry once the condition holds for it; fails the test when it does not in time."""
        deadline = time.monotonic() + within_s
        while not condition(engine := self.engine(name)):
            assert time.monotonic() < deadline, f"engine {name} is {engine['state']}: {engine.get('reason')}"
            time.sleep(0.5)
        return engine


@pytest.fixture(scope="session")
def application(tmp_path_factory):
    folder = tmp_path_factory.mktemp("application")
    config, log = folder / "config.yaml", folder / "serve.log"
    content = copy.deepcopy(CONFIG)
    content["applications"][0]["args"]["energy"] = {"ledger_path": str(folder / "ledger.sqlite")}
    config.write_text(yaml.safe_dump(content))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.launch", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            # A cluster of its own, whatever else runs on this machine.
            env={**os.environ, "RAY_ADDRESS": "local"},
            cwd=Path(__file__).parents[2],
        )
    running = Application(f"http://127.0.0.1:{PORT}", process, content, folder)
    engines = []
    try:
        _wait_until_settled(running, log)
        engines = [psutil.Process(pid) for engine in running.overview()["engines"] for pid in engine["process_ids"]]
        yield running
        engines = [psutil.Process(pid) for engine in running.overview()["engines"] for pid in engine["process_ids"]]
    finally:
        # The hardest way out: nobody is asked to clean up, and still no engine may stay behind.
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(engines, timeout=60)
        for survivor in alive:
            with contextlib.suppress(psutil.Error):
                survivor.kill()
        if alive:
            pytest.fail(f"engine processes outlived the application: {alive}")


def _wait_until_settled(running, log):
    deadline = time.monotonic() + START_WITHIN_S
    states = []
    while not states or any(state in ("queued", "starting", "unreachable") for state in states):
        assert running.process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, f"{states}\n{log.read_text()[-4000:]}"
        time.sleep(2)
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            states = [engine["state"] for engine in running.overview()["engines"]]


@pytest.fixture(scope="session")
def served():
    return SERVED
