"""Builds one checkpoint at a time: unpacks the embedded model, and quantizes dense weights."""

import json
import re
import shutil
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from app.engines import store
from app.engines.checkpoints import calibration, embedded, manifest, quantize_env
from app.engines.checkpoints.child import run_logged
from app.engines.checkpoints.errors import CheckpointCorrupt
from app.engines.checkpoints.publish import published, remove_leftovers
from app.engines.checkpoints.sources import Source
from app.engines.checkpoints.steps import Steps
from app.engines.store import Scheme

# A checkpoint made by another recipe is rebuilt: change the text when quantize.py or calibration.py changes.
RECIPES = {
    Scheme.FP16: "unpacked to bfloat16",
    Scheme.INT8: "W8A8, rounding, weights by channel, activations by token",
    Scheme.GPTQ: "W4A16, GPTQ, symmetric, group 64, 64 chats and passages of up to 256 tokens",
    Scheme.AWQ: "W4A16, AWQ, symmetric, group 64, 64 chats and passages of up to 256 tokens",
}
CALIBRATION_SAMPLES = 64
_QUANTIZE_SCRIPT = Path(__file__).with_name("quantize.py")
_LAYER = re.compile(r"\((\d+)/(\d+)\): (?:Calibrating|Propagating)")
# What vLLM reads beside config and weights; taken from the source as it is, for another version of transformers
# would write its own form of it.
_COMPANIONS = ("token*", "vocab*", "merges*", "special_tokens_map.json", "*.jinja", "*.model", "generation_config.json")


def unpacked(source: Source, home: Path, steps: Steps) -> Source:
    """Return the embedded model's source with its folder, after unpacking it if it is not there and whole."""
    target = store.checkpoint_folder(source.reference, Scheme.FP16, home)
    if not _whole(target, source, Scheme.FP16, steps):
        with published(target) as partial:
            with steps.step("fp16: unpacking the embedded model"):
                embedded.write_dense(embedded.find_gguf(), partial)
            _seal(partial, source, Scheme.FP16, {name: version(name) for name in ("torch", "transformers", "gguf")})
    return replace(source, folder=target)


def quantized(source: Source, scheme: Scheme, home: Path, steps: Steps, lock: int) -> None:
    """Make the checkpoint of `source` in `scheme` if it is not there and whole. Only under the home's lock, `lock`."""
    assert source.folder is not None
    target = store.checkpoint_folder(source.reference, scheme, home)
    if _whole(target, source, scheme, steps):
        return
    python = quantize_env.ensure(home, steps, lock)
    log = home / "logs" / f"{target.parent.name}-{scheme}.log"
    log.unlink(missing_ok=True)
    with published(target) as partial, tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch) / "calibration.json"
        texts.write_text(json.dumps(calibration.conversations(CALIBRATION_SAMPLES)), encoding="utf-8")
        with steps.step(f"{scheme}: quantizing") as advance:

            def follow(line: str) -> None:
                if layer := _LAYER.search(line):
                    advance(int(layer[1]), int(layer[2]))

            command = [str(python), "-P", str(_QUANTIZE_SCRIPT), str(source.folder), str(partial), scheme, str(texts)]
            run_logged(command, log, keep_open=lock, on_line=follow)
        for pattern in _COMPANIONS:
            for path in source.folder.glob(pattern):
                shutil.copyfile(path, partial / path.name)
        _seal(partial, source, scheme, quantize_env.versions())


def check(folder: Path, scheme: Scheme, steps: Steps) -> manifest.Manifest:
    """Check a checkpoint's every byte. Raises CheckpointCorrupt."""
    total_bytes = sum(record.size_bytes for record in manifest.check_sizes(folder).files.values())
    with steps.step(f"{scheme}: checking") as advance:
        read_bytes = 0

        def count(count_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += count_bytes
            advance(read_bytes, total_bytes)

        return manifest.check_checksums(folder, count)


def _whole(target: Path, source: Source, scheme: Scheme, steps: Steps) -> bool:
    """Tell whether `target` may be kept; says why not, and clears away what interrupted runs left."""
    if remove_leftovers(target):
        steps.say(f"{scheme}: removed what an interrupted run had left.")
    if not target.exists():
        return False
    try:
        found = check(target, scheme, steps)
    except CheckpointCorrupt as error:
        steps.say(f"{scheme}: rebuilding, {error.reason}.")
        return False
    if (found.fingerprint, found.recipe) != (source.fingerprint, RECIPES[scheme]):
        steps.say(f"{scheme}: rebuilding, the model or the recipe has changed.")
        return False
    return True


def _seal(folder: Path, source: Source, scheme: Scheme, versions: dict[str, str]) -> None:
    made = manifest.describe(
        folder,
        source=source.reference,
        fingerprint=source.fingerprint,
        scheme=scheme,
        recipe=RECIPES[scheme],
        versions=versions,
    )
    manifest.write(made, folder)
