"""`make serve`: start `serve run serve_config.yaml`, show the engines as they come up, and leave nothing behind.

`serve run` works by itself as well; this adds a faster HTTP front (Serve's HAProxy mode), what a person wants to see
while engines start, and a clean end whatever the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
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
from app.config import ConfigError, load_settings

_APPLICATION = "app.main:build"
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOP_WITHIN_S = 40.0
_LOOK_EVERY_S = 2.0
"""Seldom enough for the cores that engines are loaded on."""

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
    # As often every replica would write its own counters, which Prometheus fetches each 10 s or so.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set unless the user's environment says otherwise."""

console = Console()


def main(
    config: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Serve config file.")] = Path(
        "serve_config.yaml"
    ),
) -> None:
    """Serve until interrupted."""
    content = yaml.safe_load(config.read_text()) or {}
    if why := _refusal(content):
        console.print(why, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    http = content.get("http_options") or {}
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
    for number in _SIGNALS:
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


def _refusal(content: dict[str, Any]) -> str | None:
    """Why the application cannot be built, with or without a GPU; Serve would keep running without it."""
    for application in content.get("applications", ()):
        if application.get("import_path") == _APPLICATION:
            refusals = [_refusal_of(application.get("args") or {}, has_gpu) for has_gpu in (True, False)]
            if all(refusals):
                return refusals[0]
    return None


def _refusal_of(args: dict[str, Any], has_gpu: bool) -> str | None:
    try:
        load_settings(args, has_gpu)
    except ConfigError as error:
        return str(error)
    return None


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
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """From here on it ends; who is impatient must not interrupt that, or processes are left behind."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _die_with_parent() -> None:
    """Runs in the child: have the kernel end it when this process is killed outright (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(url: str, process: subprocess.Popen[bytes]) -> None:
    """Print each engine's changes of state, with its modes once it is ready, until all have arrived or failed.

    Ends with a table, and with a line of JSON for whoever records how long it took.
    """
    begun_s = time.monotonic()
    first_s: float | None = None
    seen: dict[str, str] = {}
    while process.poll() is None:
        # The controller answers this by itself; what costs the engines something is asked when there is news.
        states = _get(f"{url}/health/ready").get("engines", {})
        if states != seen:
            passed_s = round(time.monotonic() - begun_s, 1)
            overview = _get(f"{url}/v1/modes")
            for name in (name for name, state in states.items() if seen.get(name) != state):
                about = _about(name, states[name], overview)
                console.print(f"[{passed_s:6.1f} s] {name} is {states[name]}{about}", highlight=False, markup=False)
            seen = states
            if first_s is None and "ready" in states.values():
                first_s = passed_s
                _announce(url, keyed="error" in overview)
            if all(state in ("ready", "failed") for state in states.values()):
                if "data" in overview:
                    console.print(_table(overview))
                failed = [name for name, state in states.items() if state == "failed"]
                print(json.dumps({"first_engine_s": first_s, "all_engines_s": passed_s, "failed": failed}), flush=True)
                return
        time.sleep(_LOOK_EVERY_S)


def _get(url: str) -> dict[str, Any]:
    """A JSON object: an empty one while the application is not up, one with `error` where it wants a key."""
    try:
        found = requests.get(url, timeout=10).json()
    except (requests.RequestException, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _about(name: str, state: str, overview: dict[str, Any]) -> str:
    """What there is to say of an engine's state: the modes it serves from now on, or why it does not."""
    if state == "ready":
        modes = [mode["id"] for mode in overview.get("data", []) if mode["engine"] == name]
        return f" and serves {', '.join(modes)}" if modes else ""
    reasons = [engine.get("reason") for engine in overview.get("engines", []) if engine["name"] == name]
    return f": {reasons[0]}" if any(reasons) else ""


def _announce(url: str, keyed: bool) -> None:
    console.print(f"\nserving at [bold]{url}[/bold]; try{' (with one of your keys in KEY)' if keyed else ''}:\n")
    key = '-H "Authorization: Bearer $KEY" ' if keyed else ""
    console.print(
        f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '"
        '{"model": "auto", "messages": [{"role": "user", "content": "What is the capital of France?"}], '
        '"max_tokens": 32, "temperature": 0}\'\n',
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _table(overview: dict[str, Any]) -> Table:
    table = Table("mode", "engine", "state", "started in", "memory")
    engines = {engine["name"]: engine for engine in overview.get("engines", [])}
    for mode in overview.get("data", []):
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
    _ignore_signals()
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
