"""The catalogue of inference modes, and how modes share engines.

Source: ModeSwitch-LLM (arXiv 2605.23057), section "Inference modes": ten single modes and two hybrids.

A mode is written down as its difference to the reference mode `fp16`: which weights it loads, whether a request
may reuse cached prefixes (decided per request), and which vLLM engine arguments change. `REFERENCE` is the one
block all of them are read against. vLLM ships several of the paper's modes switched on; where that makes two modes
coincide, the mode is an alias and says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Platform = Literal["cpu", "cuda"]
Weights = Literal["fp16", "int8", "gptq", "awq"]
EngineArgs = Mapping[str, Any]

REFERENCE: Mapping[Platform, EngineArgs] = MappingProxyType(
    {
        "cuda": {
            "dtype": "auto",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 8192,
            "enforce_eager": False,
            "kv_cache_dtype": "auto",
            "speculative_config": None,
        },
        # Eager, because compiling takes minutes for each engine on a CPU and there are no CUDA graphs.
        "cpu": {
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
            "kv_cache_dtype": "auto",
            "speculative_config": None,
        },
    }
)
"""vLLM engine arguments of the mode `fp16`: 16-bit weights, no prefix reuse, the rest as vLLM ships it."""

NGRAM_SPECULATION: EngineArgs = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One named, fixed inference configuration, as its difference to `fp16`.

    `engine_args` apply on every platform and `platform_args` on top of them on one. `draft_model` asks for a draft
    model (named in the configuration) as the speculator. `alias_of` names, per platform, the mode this one coincides
    with and the reason; `unsupported` names the platforms it cannot run on and the reason. `lossless` says that the
    output distribution equals the reference's by construction.
    """

    name: str
    paper_name: str
    weights: Weights = "fp16"
    prefix_reuse: bool = False
    engine_args: EngineArgs = field(default_factory=dict)
    platform_args: Mapping[Platform, EngineArgs] = field(default_factory=dict)
    draft_model: frozenset[Platform] = frozenset()
    alias_of: Mapping[Platform, tuple[str, str]] = field(default_factory=dict)
    unsupported: Mapping[Platform, str] = field(default_factory=dict)
    lossless: bool = True

    def delta(self, platform: Platform) -> dict[str, Any]:
        """Engine arguments that differ from `REFERENCE[platform]`."""
        return {**self.engine_args, **self.platform_args.get(platform, {})}


_SCHEDULED_EVERY_STEP = "vLLM forms the batch anew at every step; an engine without continuous batching does not exist"
_GRAPHS_ARE_ON = "the reference already captures CUDA graphs; fp16_eager is the same mode without them"

CATALOGUE: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Mode("fp16", "FP16"),
            Mode("int8", "INT8 (W8A8)", weights="int8", lossless=False),
            Mode("gptq", "GPTQ 4-bit", weights="gptq", lossless=False),
            Mode("awq", "AWQ 4-bit", weights="awq", lossless=False),
            Mode(
                "speculative",
                "Speculative decoding",
                platform_args={"cpu": NGRAM_SPECULATION},
                draft_model=frozenset({"cuda"}),
            ),
            Mode("prefix_caching", "Prefix caching", prefix_reuse=True),
            Mode(
                "chunked_prefill",
                "Chunked prefill",
                # vLLM always chunks; the mode is a small chunk, so that decoding goes on beside a long prompt.
                platform_args={"cpu": {"max_num_batched_tokens": 256}, "cuda": {"max_num_batched_tokens": 512}},
            ),
            Mode(
                "continuous_batching",
                "Continuous batching",
                alias_of={"cpu": ("fp16", _SCHEDULED_EVERY_STEP), "cuda": ("fp16", _SCHEDULED_EVERY_STEP)},
            ),
            Mode(
                "cuda_graphs",
                "CUDA graphs",
                # The nearest thing on a CPU is the compiled model: minutes to start, then fewer dispatches a step.
                platform_args={"cpu": {"enforce_eager": False}},
                alias_of={"cuda": ("fp16", _GRAPHS_ARE_ON)},
            ),
            Mode("kv_cache_compression", "KV-cache compression", engine_args={"kv_cache_dtype": "fp8"}, lossless=False),
            Mode("gptq_prefix_caching", "GPTQ + prefix caching", weights="gptq", prefix_reuse=True, lossless=False),
            Mode(
                "int8_continuous_batching",
                "INT8 + continuous batching",
                weights="int8",
                lossless=False,
                alias_of={"cpu": ("int8", _SCHEDULED_EVERY_STEP), "cuda": ("int8", _SCHEDULED_EVERY_STEP)},
            ),
            # Not in the paper's list, needed to compare with it or with the other way to speculate.
            Mode(
                "fp16_eager",
                "FP16, eager (the paper's baseline)",
                platform_args={"cuda": {"enforce_eager": True}},
                alias_of={"cpu": ("fp16", "the reference on a CPU already runs eager")},
            ),
            Mode("speculative_ngram", "Speculative decoding, n-gram", engine_args=NGRAM_SPECULATION),
            Mode(
                "speculative_draft",
                "Speculative decoding, draft model",
                draft_model=frozenset({"cpu", "cuda"}),
            ),
        )
    }
)


def kv_cache_changes(mode: Mode) -> frozenset[str]:
    """How a mode treats the KV cache other than the reference: `drafts`, `reuse` of prefixes, another `dtype`."""
    args = {key for delta in (mode.engine_args, *mode.platform_args.values()) for key in delta}
    found = {
        "drafts": bool(mode.draft_model) or "speculative_config" in args,
        "reuse": mode.prefix_reuse,
        "dtype": "kv_cache_dtype" in args,
    }
    return frozenset(change for change, made in found.items() if made)


def compose(name: str, parts: Iterable[Mode], engine_args: EngineArgs | None = None) -> Mode:
    """One mode with the deltas of several: `compose("gptq_fp8kv", [gptq, kv_cache_compression])`.

    It is lossless where every part is, nothing but parts changes it, and at most one way to treat the KV cache does.

    Raises:
        ValueError: two parts want different weights or different values of one engine argument, or there is no part.
    """
    parts = tuple(parts)
    if not parts:
        raise ValueError(f"mode {name!r}: composed of nothing")
    weights = {part.weights for part in parts} - {"fp16"}
    if len(weights) > 1:
        raise ValueError(f"mode {name!r}: parts want different weights: {', '.join(sorted(weights))}")
    platforms: tuple[Platform, ...] = ("cpu", "cuda")
    merged: dict[Platform, dict[str, Any]] = {platform: {} for platform in platforms}
    for platform, args in merged.items():
        for part in parts:
            for key, value in part.delta(platform).items():
                if args.setdefault(key, value) != value:
                    raise ValueError(f"mode {name!r}: parts disagree on {key}: {args[key]!r} and {value!r}")
        args.update(engine_args or {})
    return Mode(
        name,
        " + ".join(part.paper_name for part in parts),
        weights=weights.pop() if weights else "fp16",
        prefix_reuse=any(part.prefix_reuse for part in parts),
        platform_args=merged,
        draft_model=frozenset().union(*(part.draft_model for part in parts)),
        unsupported={platform: why for part in parts for platform, why in part.unsupported.items()},
        # Arguments given freely may change the output. So may two techniques on one KV cache, each exact alone: drafts
        # that are rejected were written to blocks that prefix reuse hands on (vllm#43559 lost 20 % of accuracy).
        lossless=all(part.lossless for part in parts)
        and not engine_args
        and len(frozenset().union(*map(kv_cache_changes, parts))) < 2,
    )


@dataclass(frozen=True, slots=True)
class CarriedMode:
    """A mode on its engine, with what differs per request."""

    name: str
    paper_name: str
    prefix_reuse: bool
    lossless: bool
    alias_of: str | None = None
    alias_reason: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to start: its weights, its delta to the reference, and the modes it carries.

    `delta` holds vLLM engine arguments that differ from `REFERENCE`; `prefix_caching` is switched on as soon as one
    carried mode reuses prefixes (the others then opt out per request with a salt of their own).
    """

    name: str
    weights: Weights
    delta: dict[str, Any]
    draft_model: bool
    modes: tuple[CarriedMode, ...]

    @property
    def prefix_caching(self) -> bool:
        return any(mode.prefix_reuse for mode in self.modes)

    def exact_delta(self, draft: str | None) -> dict[str, Any]:
        """`delta` with the speculator that the configuration names, where this engine has one."""
        if not self.draft_model:
            return dict(self.delta)
        return {**self.delta, "speculative_config": {"model": draft, "num_speculative_tokens": 5}}


def group_into_engines(modes: Iterable[Mode], platform: Platform, share: bool = True) -> tuple[EngineSpec, ...]:
    """Group modes with equal engine settings on one engine, named after its first mode.

    With `share=False` every mode gets an engine of its own (weights are then loaded once per mode).

    Raises:
        ValueError: a mode does not run on this platform (the message says why), or a mode is named twice.
    """
    groups: dict[object, list[Mode]] = {}
    seen: set[str] = set()
    for mode in modes:
        if mode.name in seen:
            raise ValueError(f"mode {mode.name!r} is named twice")
        seen.add(mode.name)
        if platform in mode.unsupported:
            raise ValueError(f"mode {mode.name!r} does not run on {platform}: {mode.unsupported[platform]}")
        settings = (mode.weights, platform in mode.draft_model, _freeze(mode.delta(platform)))
        groups.setdefault(settings if share else mode.name, []).append(mode)
    return tuple(_engine(group, platform) for group in groups.values())


def _engine(group: list[Mode], platform: Platform) -> EngineSpec:
    first = group[0]
    carried = tuple(
        CarriedMode(m.name, m.paper_name, m.prefix_reuse, m.lossless, *m.alias_of.get(platform, (None, None)))
        for m in group
    )
    return EngineSpec(first.name, first.weights, first.delta(platform), platform in first.draft_model, carried)


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    return value
