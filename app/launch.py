"""`make serve`: start `serve run serve_config.yaml`, show the engines as they come up, and leave nothing behind.

`serve run` works by itself as well; this adds a faster HTTP front (Serve's HAProxy mode), what a person wants to see
while engines start, and a clean end whatever the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import psutil
import requests
import typer
import yaml
from rich.console import Console
from rich.table import Table

from app import haproxy

_PR_SET_PDEATHSIG = 1
_STOP_WITHIN_S = 40.0

FAST_PATH = {
    # HTTP reaches the controller's process through HAProxy instead of a Python proxy: a third of the work per frame.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    haproxy.SERVE_SETTING: str(Path(sys.executable).with_name(haproxy.PROGRAM)),
    # Calls between replicas without a thread hop for each.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # How long a front stays up for load balancers to notice that it goes; here there are none, and Ctrl-C waits for it.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
    # Ray starts its workers at niceness 15: anything else on the machine would be served before the engines.
    "RAY_worker_niceness": "0",
    # Serve's controller goes through all deployments ten times a second by default, which on few cores is felt.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set unless the user's environment says otherwise."""

console = Console()


def main(config: Annotated[Path, typer.Argument(help="A Serve config file.")] = Path("serve_config.yaml")) -> None:
    """Serve until interrupted."""
    http = yaml.safe_load(config.read_text()).get("http_options", {})
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    url = f"http://{host}:{port}"
    if _in_use(host, port):
        console.print(
            f"[red]{url} is in use: something else listens there, perhaps another run that still stops.[/red]"
        )
        raise typer.Exit(1)
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("serve")), "run", str(config)],
        env={**FAST_PATH, **os.environ},
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        _follow(url, process)
        code = process.wait()
    except KeyboardInterrupt:
        code = 0
        console.print("stopping")
    finally:
        _stop(process)
    raise typer.Exit(code)


def _in_use(host: str, port: int) -> bool:
    """Whether the port is taken; Serve would try again and again, and say so at length."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    """Runs in the child: have the kernel end it when this process is killed outright (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(url: str, process: subprocess.Popen[bytes]) -> None:
    """Print each engine's changes of state until all have arrived or failed."""
    begun_s, announced = time.monotonic(), False
    seen: dict[str, tuple[str, str | None]] = {}
    while process.poll() is None:
        overview = _overview(url)
        for engine in overview.get("engines", []):
            state = (engine["state"], engine.get("reason"))
            if seen.get(engine["name"]) != state:
                seen[engine["name"]] = state
                reason = f": {engine['reason']}" if engine.get("reason") else ""
                console.print(f"[{time.monotonic() - begun_s:6.1f} s] {engine['name']} is {engine['state']}{reason}")
        states = [state for state, _ in seen.values()]
        if "ready" in states and not announced:
            announced = True
            _announce(url, overview)
        if states and all(state in ("ready", "failed") for state in states):
            console.print(_table(overview))
            return
        time.sleep(1.0)


def _overview(url: str) -> dict[str, Any]:
    """`GET /v1/modes`, or nothing while the application is not up."""
    try:
        answer = requests.get(f"{url}/v1/modes", timeout=10)
        return answer.json() if answer.ok else {}
    except (requests.RequestException, ValueError):
        return {}


def _announce(url: str, overview: dict[str, Any]) -> None:
    console.print(f"\nserving at [bold]{url}[/bold]; try:\n")
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '"
        '{"model": "auto", "messages": [{"role": "user", "content": "What is the capital of France?"}], '
        '"max_tokens": 32}\'\n',
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _table(overview: dict[str, Any]) -> Table:
    table = Table("mode", "engine", "state", "started in", "memory")
    engines = {engine["name"]: engine for engine in overview["engines"]}
    for mode in overview["data"]:
        engine = engines[mode["engine"]]
        started, resident = engine.get("started_in_s"), engine.get("resident_bytes")
        table.add_row(
            mode["id"],
            mode["engine"],
            engine["state"],
            "" if started is None else f"{started:.0f} s",
            "" if resident is None else f"{resident / 2**30:.2f} GiB",
        )
    return table


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End Serve and everything below it, politely first."""
    tree = _tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WITHIN_S)
    for survivor in tree + _tree(process.pid):
        with contextlib.suppress(psutil.Error):
            survivor.kill()
    process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


if __name__ == "__main__":
    typer.run(main)
