"""Kills an engine's processes once the replica that started them is gone.

Run as `python -m app.engines.reaper MARKER` with a pipe from the replica as standard input. A replica that is killed
outright (SIGKILL, out of memory) cannot clean up after itself, and its vLLM worker would hold the device's memory.
"""

from __future__ import annotations

import os
import sys
import time

from app.engines.processes import kill_marked


def main(marker: str) -> None:
    # Leave the parent's family: Ray kills the children of a worker that ends, which would include this process.
    if os.fork():
        os._exit(0)
    sys.stdin.buffer.read()
    # Twice, because a process can be in the middle of starting another one.
    while kill_marked(marker):
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
