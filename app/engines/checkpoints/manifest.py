"""What a finished checkpoint folder contains, and whether it still does.

A checkpoint is whole if and only if its folder holds a `manifest.json` and every file it lists is there unchanged.
The manifest is written last, into the temporary folder, so a folder without one was never finished by this project.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.engines.checkpoints.errors import CheckpointCorrupt

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint: its size in bytes and the hex SHA-256 of its content."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record that makes a folder a checkpoint.

    `source` is the model reference, `fingerprint` identifies the exact source weights, `recipe` names how the
    weights were made from them, `created` is an ISO 8601 time in UTC, and `files` is keyed by POSIX relative path.
    """

    source: str
    fingerprint: str
    scheme: str
    recipe: str
    versions: Mapping[str, str]
    created: str
    files: Mapping[str, FileRecord]
    format: int = FORMAT


def describe(
    folder: Path, *, source: str, fingerprint: str, scheme: str, recipe: str, versions: Mapping[str, str]
) -> Manifest:
    """Read every file under `folder` once and return the manifest that fits it; an old manifest is not listed."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_NAME
    }
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(source, fingerprint, scheme, recipe, dict(versions), created, files)


def write(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """Return the manifest in `folder`.

    Raises CheckpointCorrupt if it is absent, unreadable or of another format.
    """
    path = folder / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["files"] = {name: FileRecord(**record) for name, record in fields["files"].items()}
        manifest = Manifest(**fields)
    except FileNotFoundError:
        raise CheckpointCorrupt(folder, f"{MANIFEST_NAME} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(folder, f"{MANIFEST_NAME} cannot be read ({error})") from error
    if manifest.format != FORMAT or not manifest.files:
        raise CheckpointCorrupt(folder, f"{MANIFEST_NAME} is of another format")
    return manifest


def check_sizes(folder: Path) -> Manifest:
    """Check that every listed file exists with its recorded size: microseconds, fit for the start of an engine.

    Returns the manifest; raises CheckpointCorrupt.
    """
    manifest = read(folder)
    for name, record in manifest.files.items():
        try:
            size_bytes = (folder / name).stat().st_size
        except OSError:
            raise CheckpointCorrupt(folder, f"{name} is missing") from None
        if size_bytes != record.size_bytes:
            raise CheckpointCorrupt(folder, f"{name} has {size_bytes} bytes, {record.size_bytes} expected")
    return manifest


def check_checksums(folder: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Manifest:
    """Check the sizes and the SHA-256 of every listed file; `on_bytes` hears how many bytes each step has read.

    Returns the manifest; raises CheckpointCorrupt.
    """
    manifest = check_sizes(folder)
    for name, record in manifest.files.items():
        try:
            actual = sha256_of(folder / name, on_bytes)
        except OSError as error:
            raise CheckpointCorrupt(folder, f"{name} cannot be read ({error})") from error
        if actual != record.sha256:
            raise CheckpointCorrupt(folder, f"{name} does not match its checksum")
    return manifest


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the hex SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()
