"""Folders that appear whole or not at all, whatever kills the process that makes them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".partial-"


@contextmanager
def published(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary sibling of `target`, and rename it to `target` when the block ends without an error.

    On an error, or on an exception raised by a signal, the temporary folder is removed; after a SIGKILL it stays
    under a name no reader looks at, until `remove_leftovers`. An existing `target` stays in place until the block has
    ended well. `durable` brings the files to the disk first. Only for use under the home's lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
    try:
        yield partial
        _open_to_readers(partial)
        if durable:
            _flush(partial)
        if target.exists():
            # rename(2) replaces only an empty folder. An engine that has the old files mapped keeps them.
            target.rename(Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent)) / "replaced")
        partial.rename(target)
        _flush_entry(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        remove_leftovers(target)


def remove_leftovers(target: Path) -> list[Path]:
    """Remove what interrupted runs left beside `target` and return it. Only under the home's lock: see `published`."""
    leftovers = sorted(target.parent.glob(f".{target.name}{_MARK}*"))
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return leftovers


def _flush(folder: Path) -> None:
    """Bring the files to the disk before the name, or a power cut could leave a full name over empty files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            _flush_entry(path)
    _flush_entry(folder)


def _open_to_readers(folder: Path) -> None:
    """mkdtemp and safetensors write for their owner only; a checkpoint may be served by another user."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o444)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
