"""Finds the dense weights a checkpoint is made from, and tells one state of them from another."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from app.engines import store
from app.engines.checkpoints import embedded
from app.engines.checkpoints.errors import PrepareError

_NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model's dense weights. `folder` is None while they are still packed in the embedded model."""

    reference: str
    fingerprint: str
    folder: Path | None


def find(reference: str) -> Source:
    """Return the source of a reference; a Hugging Face name is downloaded into that library's own cache.

    Raises PrepareError if there is no such model, no network for it, or its weights are quantized already.
    """
    if reference == embedded.REFERENCE:
        embedded.find_gguf()
        return Source(reference, embedded.fingerprint(), None)
    if store.is_hub_name(reference):
        folder = _downloaded(reference)
        return Source(reference, folder.name, _dense(folder))  # the folder's name is the commit
    folder = _dense(store.local_folder(reference))
    return Source(str(folder), _folder_fingerprint(folder), folder)


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_NEEDED_FILES))
    except (OSError, LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise PrepareError(
            f"{name} is neither a local folder nor could it be downloaded from Hugging Face ({type(error).__name__}). "
            "With no network, give a local folder, or `embedded` for the model that comes with the installation."
        ) from error


def _dense(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise PrepareError(
            f"The weights in {folder} are quantized already. Name them under `checkpoints` in the configuration, "
            "and give the dense model as the model."
        )
    return folder


def _folder_fingerprint(folder: Path) -> str:
    """Sizes and times stand in for the content, which may be tens of gigabytes."""
    states = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    text = "\n".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states)
    return hashlib.sha256(text.encode()).hexdigest()
