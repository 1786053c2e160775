"""How fast an engine could decode one stream if reading its weights were all there is to it."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.bandwidth import ReadBandwidth, read_bandwidth

_OUTPUT_LAYER = "lm_head."
_INPUT_EMBEDDINGS = ("embed_tokens.", "word_embeddings.", "wte.")


@dataclass(frozen=True, slots=True)
class DecodeLimit:
    """Of one engine; unknown is None."""

    bytes_per_step: int | None
    bandwidth: ReadBandwidth | None

    @property
    def steps_per_s(self) -> float | None:
        """Tokens per s of one stream, or several times that where speculation yields several tokens a step."""
        if self.bandwidth is None or not self.bytes_per_step:
            return None
        return self.bandwidth.bytes_per_s / self.bytes_per_step

    def share(self, step_ms: float | None) -> float | None:
        """Which part of the limit steps of this length reach; 1 is as fast as the weights can be read."""
        return 1000 / step_ms / self.steps_per_s if step_ms and self.steps_per_s else None

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_per_step": self.bytes_per_step,
            "bandwidth": None if self.bandwidth is None else self.bandwidth._asdict(),
            "steps_per_s": self.steps_per_s,
        }


def decode_limits(
    states: Iterable[Mapping[str, Any]], measure: Callable[[int], ReadBandwidth | None] = read_bandwidth
) -> dict[str, DecodeLimit]:
    """By engine, from their states in `GET /v1/modes`.

    The bandwidth is measured once for each number of threads that an engine computes with, and only for engines whose
    weights lie on this machine: of another one it would say nothing.
    """
    measured: dict[int, ReadBandwidth | None] = {}
    found = {}
    for state in states:
        size, threads = bytes_per_step(state.get("engine_args")), _threads(state)
        if size is not None and threads not in measured:
            measured[threads] = measure(threads)
        found[str(state.get("name"))] = DecodeLimit(size, None if size is None else measured[threads])
    return found


def _threads(state: Mapping[str, Any]) -> int:
    told = str((state.get("env") or {}).get("OMP_NUM_THREADS", ""))
    return int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0))


def bytes_per_step(engine_args: Mapping[str, Any] | None) -> int | None:
    """Bytes of weights that a decode step of one stream reads; None where that cannot be told from files.

    Counted is every tensor of the model's safetensors files, as stored. Tied embeddings are stored once and count,
    since the output layer reads all of them; where that layer has a tensor of its own, the input embeddings do not
    count, of which a step looks up one row. Not counted are the KV cache and activations, so the limit is of a short
    context. All experts of a mixture count, although a token needs few: its limit is too low. An engine with a draft
    model reads that one too, so its bytes are not known here.
    """
    args = engine_args or {}
    draft = (args.get("speculative_config") or {}).get("model")
    if not args.get("model") or draft is not None:
        return None
    try:
        tensors = _tensor_bytes(Path(str(args["model"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    own_output_layer = any(_OUTPUT_LAYER in name for name in tensors)
    counted = (
        size for name, size in tensors.items() if not (own_output_layer and any(of in name for of in _INPUT_EMBEDDINGS))
    )
    return sum(counted) or None


def _tensor_bytes(folder: Path) -> dict[str, int]:
    """Sizes by name. Raises OSError, ValueError, KeyError, TypeError or AttributeError for unreadable files."""
    index = folder / "model.safetensors.index.json"
    # A folder may hold the same weights a second time in another layout, which the index leaves out.
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["model.safetensors"]
    return {name: size for file in names for name, size in _header(folder / file)}


def _header(path: Path) -> list[tuple[str, int]]:
    """Tensors of a safetensors file: the length of its header in 8 bytes, then that header as JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [
        (name, entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    ]
