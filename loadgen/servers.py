"""Starting the two servers that are compared, waiting for them, and ending them on every way out."""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from loadgen.bare_server import EngineUnknown, describe_engine
from loadgen.client import OpenAIClient, ServerFault
from loadgen.process_tree import start_group, stop_group
from loadgen.records import OutputUnwritable

_POLL_S = 0.5
_LOG_LINES = 15


class StartFailed(Exception):
    """A server did not come up; the message has the last lines of its log."""


@asynccontextmanager
async def running(
    command: Sequence[str], env: Mapping[str, str], log: Path, ready: Callable[[], Awaitable[bool]], timeout_s: float
) -> AsyncIterator[int]:
    """Runs `command` until the block is left and yields its process id once `ready` says so. Raises StartFailed."""
    try:
        process = start_group(command, dict(env), log)
    except OSError as error:
        raise StartFailed(f"cannot start {command[0]}: {error}") from error
    try:
        await _wait(process, ready, log, timeout_s)
        yield process.pid
    finally:
        stop_group(process)


async def _wait(
    process: "subprocess.Popen[bytes]", ready: Callable[[], Awaitable[bool]], log: Path, timeout_s: float
) -> None:
    deadline = time.perf_counter() + timeout_s
    while not await ready():
        if process.poll() is not None:
            raise StartFailed(f"the server ended with status {process.returncode} while starting:\n{_tail(log)}")
        if time.perf_counter() > deadline:
            raise StartFailed(f"the server was not ready within {timeout_s:g} s; its log {log} ends:\n{_tail(log)}")
        await asyncio.sleep(_POLL_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


async def answers(client: OpenAIClient) -> bool:
    """True when the server lists its models."""
    try:
        await client.get_json("/v1/models")
    except ServerFault:
        return False
    return True


async def mode_ready(client: OpenAIClient, mode: str) -> bool:
    """True when the application has `mode` ready."""
    try:
        describe_engine(await client.get_json("/v1/modes"), mode)
    except (ServerFault, EngineUnknown):
        return False
    return True


def one_mode_config(serve_config: Path, mode: str, folder: Path) -> Path:
    """A copy of a Serve config with `mode` as the only mode. Raises StartFailed when it cannot be read."""
    try:
        config: Any = yaml.safe_load(serve_config.read_text())
        args = config["applications"][0].setdefault("args", {})
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise StartFailed(f"{serve_config} is no usable Serve config: {error}") from error
    args["modes"] = [mode]
    args["live"] = {**args.get("live", {}), "policy": f"static:{mode}"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=folder, prefix="serve-", delete=False) as copy:
        yaml.safe_dump(config, copy)
    return Path(copy.name)


def serve_command(config: Path) -> list[str]:
    """The application as `make serve` starts it, with the Python that runs this program."""
    return [sys.executable, "-m", "app.launch", str(config)]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_json(path: Path, value: Any) -> None:
    """Writes a summary whole or not at all, and makes its folder. Raises OutputUnwritable."""
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        raise OutputUnwritable(f"cannot write {path}: {error.strerror or error}") from error
