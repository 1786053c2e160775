"""Runs a long command with its output in a log, and ends it when this process ends."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from app.engines.checkpoints.errors import PrepareError

_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end their lines with a carriage return
_TERMINATE_S = 5.0
_TAIL_LINES = 8


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    keep_open: int,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run `command` with stdout and stderr appended to `log`; `on_line` hears every line as it comes.

    The child inherits the descriptor `keep_open` (the home's lock), and a pipe as stdin that closes when this process
    ends. Whatever ends this call early, a signal's exception included, ends the child's whole process group. Raises
    PrepareError, with the log's path and last lines, if the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as record:
        record.write(f"$ {' '.join(command)}\n".encode())
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[keep_open],
            start_new_session=True,  # a Ctrl-C at the terminal reaches this process only, which then ends the child
        )
        try:
            assert child.stdout is not None
            tail = _follow(child.stdout, record, on_line)
            code = child.wait()
        finally:
            _end_group(child)
    if code != 0:
        raise PrepareError("\n".join([f"`{Path(command[0]).name}` failed with exit status {code}; log: {log}", *tail]))


def _follow(output: IO[bytes], record: IO[bytes], on_line: Callable[[str], None]) -> list[str]:
    """Copy `output` to `record` until it ends; return its last lines."""
    tail: list[str] = []
    pending = b""
    while chunk := os.read(output.fileno(), 1 << 16):
        record.write(chunk)
        record.flush()
        *lines, pending = _LINE_END.split(pending + chunk)
        for line in (raw.decode(errors="replace").rstrip() for raw in lines):
            if line:
                on_line(line)
                tail = [*tail[1 - _TAIL_LINES :], line]
    return [*tail, pending.decode(errors="replace")] if pending else tail


def _end_group(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
