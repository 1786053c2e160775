"""Where a model's weights lie, for every weight scheme an engine can serve.

    >>> store.resolve("embedded", "int8", checkpoints={}, home=store.default_home())
    '/home/me/.cache/modeswitch/checkpoints/smollm2-135m-instruct/int8'

A reference is `embedded`, a local folder, or a Hugging Face name. Answers come from the disk alone and in milliseconds:
nothing here downloads, converts or imports an inference library. `app.engines.prepare` makes what is missing.
"""

import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from app.config import default_home
from app.engines.checkpoints import embedded, manifest
from app.engines.checkpoints.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMissing",
    "Scheme",
    "checkpoint_folder",
    "default_home",
    "is_hub_name",
    "local_folder",
    "model_path",
    "resolve",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Scheme(StrEnum):
    """How weights are stored; only `fp16` is the model as published."""

    FP16 = "fp16"
    """16-bit and dense: bfloat16 on CPU."""
    INT8 = "int8"
    """8-bit weights and activations (W8A8), compressed-tensors."""
    GPTQ = "gptq"
    """4-bit weights (W4A16), symmetric, groups of 64, rounded by GPTQ."""
    AWQ = "awq"
    """4-bit weights (W4A16), symmetric, groups of 64, scaled by AWQ."""


def resolve(reference: str, scheme: str, checkpoints: Mapping[str, str], home: Path) -> str:
    """Return the folder or Hugging Face name to load for `scheme`.

    `checkpoints` maps a scheme to a reference of ready weights and wins over what `prepare` has made. Raises ValueError
    for an unknown scheme, CheckpointMissing or CheckpointCorrupt.
    """
    if ready := checkpoints.get(Scheme(scheme)):
        return model_path(ready, Scheme.FP16, home)
    return model_path(reference, scheme, home)


def model_path(reference: str, scheme: str, home: Path) -> str:
    """Return the folder or Hugging Face name that holds `reference` in `scheme`.

    A local folder and a Hugging Face name are their own `fp16`; everything else lies under `home`, is checked by its
    manifest and file sizes, and was made by `prepare`. Raises ValueError for an unknown scheme, CheckpointMissing or
    CheckpointCorrupt.
    """
    scheme = Scheme(scheme)
    if scheme is Scheme.FP16 and reference != embedded.REFERENCE:
        return reference if is_hub_name(reference) else str(local_folder(reference))
    folder = checkpoint_folder(reference, scheme, home)
    if not folder.is_dir():
        raise CheckpointMissing(
            f"{reference} has not been prepared in {scheme} under {home}. Run `{prepare_command(reference, scheme)}`"
            + ("." if home == default_home() else f" with `--home {home}`.")
        )
    manifest.check_sizes(folder)
    return str(folder)


def prepare_command(reference: str, scheme: Scheme) -> str:
    """Return the command line that makes one checkpoint in the default home."""
    return f"python -m app.engines.prepare --model {reference} --scheme {scheme}"


def checkpoint_folder(reference: str, scheme: Scheme, home: Path) -> Path:
    """Return the place of a prepared checkpoint, whether or not it exists."""
    return home / "checkpoints" / _folder_name(reference) / scheme


def is_hub_name(reference: str) -> bool:
    """Tell a Hugging Face name from a folder; a folder that exists wins, as it does in transformers and vLLM."""
    return _HUB_NAME.fullmatch(reference) is not None and not Path(reference).is_dir()


def local_folder(reference: str) -> Path:
    """Return the absolute path of a local model folder.

    Raises CheckpointMissing if it does not exist or holds no model.
    """
    folder = Path(reference).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise CheckpointMissing(f"{folder} holds no model: there is no config.json in it.")
    return folder


def _folder_name(reference: str) -> str:
    if reference == embedded.REFERENCE:
        return embedded.FOLDER_NAME
    if is_hub_name(reference):
        return reference.replace("/", "--")
    folder = Path(reference).expanduser().absolute()
    # Two folders of one name in different places must not share their checkpoints.
    return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
