"""One preparing process per home, for as long as it or anything it started lives."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = "prepare.lock"


@contextmanager
def home_locked(home: Path, on_wait: Callable[[str], None]) -> Iterator[int]:
    """Hold the home's lock, waiting for it if need be; yields its file descriptor.

    `on_wait` hears the holder's process id once if there is one. A child that inherits the descriptor keeps the lock
    held: when only the parent is killed, the next run waits until no orphan can write any more. The lock is the
    kernel's (flock), so it cannot outlive its holders; its file stays.
    """
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(os.pread(descriptor, 32, 0).decode(errors="replace").strip())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
