"""From repeated, noisy measurements to the coefficients of a profile. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from loadgen.calibration_plan import Engine, Text

Samples = dict[int, list[float]]
"""Repeated measurements by x: prompt tokens, or batch size."""


def rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The closest curve (least squares) that never falls: more work never takes less time, whatever the noise said.

    points: (x, value) by rising x. Pool adjacent violators; source: Barlow et al., Statistical Inference under Order
    Restrictions, 1972.
    """
    pools: list[list[float]] = []
    for _, value in points:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    levels = [level for pool in pools for level in [fmean(pool)] * len(pool)]
    return [(x, level) for (x, _), level in zip(points, levels, strict=True)]


def medians(samples: Samples) -> list[tuple[int, float]]:
    """The median of each point, by rising x: one disturbed round does not move it."""
    return [(x, median(values)) for x, values in sorted(samples.items()) if values]


def accepted_per_step(generated_tokens: int, accepted_tokens: int, requests: int) -> float | None:
    """Draft tokens accepted per decode step of one sequence, from an engine's counters; None for no step.

    The prefill of each request yields its first token without a decode step.
    """
    steps = generated_tokens - requests - accepted_tokens
    return accepted_tokens / steps if steps > 0 and accepted_tokens >= 0 else None


class StreamEnergy(NamedTuple):
    """A whole request's joules, and what it consisted of."""

    prompt_tokens: int
    output_tokens: int
    joules: float


@dataclass(slots=True)
class EngineSamples:
    """What was measured of one engine. Times in ms, energy in J."""

    prefill_ms: Samples = field(default_factory=dict)
    prefill_j: Samples = field(default_factory=dict)
    step_ms: dict[Text, Samples] = field(default_factory=dict)
    streams_j: dict[int, list[StreamEnergy]] = field(default_factory=dict)
    """By batch size."""
    together_ms: dict[str, list[float]] = field(default_factory=dict)
    """Its step at batch 1 while the engine of that name decodes one stream."""
    generated: dict[Text, int] = field(default_factory=dict)
    accepted: dict[Text, int] = field(default_factory=dict)
    requests: dict[Text, int] = field(default_factory=dict)
    peak_memory_bytes: float | None = None

    @property
    def usable(self) -> bool:
        """A curve needs two prompt lengths, and a step time one batch size."""
        return len(self.prefill_ms) >= 2 and any(self.step_ms.values())


def add_sample(samples: Samples, x: int, value: float) -> None:
    samples.setdefault(x, []).append(value)


def step_curve(samples: EngineSamples) -> list[tuple[int, float]]:
    """Step time by batch on free text, where next to nothing is drafted; on what there is if that was not measured."""
    measured = samples.step_ms.get(Text.FREE) or next(iter(samples.step_ms.values()), {})
    return rising(medians(measured))


def speculation_of(samples: EngineSamples) -> dict[str, Any]:
    """Accepted tokens per step by tag, in the profile's form; free text is the default."""
    rates = {
        text: accepted_per_step(tokens, samples.accepted.get(text, 0), samples.requests.get(text, 0))
        for text, tokens in samples.generated.items()
    }
    rewriting, free = rates.get(Text.REWRITING), rates.get(Text.FREE)
    return {
        "accepted_per_step": {} if rewriting is None else {"rewriting": rewriting},
        "default": free or 0.0,
        "verification": _verification(samples, rewriting or 0.0, free or 0.0),
    }


def _verification(samples: EngineSamples, rewriting: float, free: float) -> float:
    """What each accepted token adds to a step, as a share of it: from how much longer steps are on rewriting."""
    by_batch = {text: dict(medians(of)) for text, of in samples.step_ms.items()}
    plain, drafted = by_batch.get(Text.FREE, {}), by_batch.get(Text.REWRITING, {})
    ratios = [drafted[batch] / plain[batch] for batch in plain.keys() & drafted.keys()]
    return max(0.0, (median(ratios) - 1.0) / (rewriting - free)) if ratios and rewriting > free else 0.0


def decode_energy(
    prefill_j: Sequence[tuple[int, float]], streams_j: Mapping[int, Sequence[StreamEnergy]]
) -> list[tuple[int, float]]:
    """Joules per decoded token by batch size: a request's joules without those of its prefill, which are a curve."""
    lengths, joules = [x for x, _ in prefill_j], [value for _, value in prefill_j]
    return medians(
        {
            batch: [
                max(0.0, one.joules - float(np.interp(one.prompt_tokens, lengths, joules))) / (one.output_tokens - 1)
                for one in streams
                if one.output_tokens > 1
            ]
            for batch, streams in streams_j.items()
        }
    )


def mode_profile(engine: Engine, samples: EngineSamples, plain: EngineSamples | None = None) -> dict[str, Any]:
    """An engine's coefficients in the profile's form; what was not measured is None.

    plain: samples of the engine that differs by drafts alone. Without a draft to verify the steps of both are the
    same, so that what drafts cost is all that a speculative engine's may be longer by.
    """
    prefill_j = rising(medians(samples.prefill_j))
    steps = step_curve(samples)
    if plain is not None and (plain_steps := step_curve(plain)):
        batches, plain_ms = [batch for batch, _ in plain_steps], [ms for _, ms in plain_steps]
        steps = [(batch, max(ms, float(np.interp(batch, batches, plain_ms)))) for batch, ms in steps]
    decode_j = decode_energy(prefill_j, samples.streams_j) if len(prefill_j) > 1 else []
    return {
        "prefill_ms": rising(medians(samples.prefill_ms)),
        "step_ms": steps,
        "prefill_j": prefill_j if len(prefill_j) > 1 else None,
        "decode_j_per_token": decode_j or None,
        "peak_memory_bytes": samples.peak_memory_bytes,
        "speculation": speculation_of(samples) if engine.speculative else None,
    }


def interference(samples: Mapping[str, EngineSamples]) -> dict[str, dict[str, float]]:
    """`[engine][other]`: how many times slower a stream of `engine` is while `other` decodes one; at least 1."""
    found: dict[str, dict[str, float]] = {}
    for name, of in samples.items():
        alone = of.step_ms.get(Text.FREE, {}).get(1)
        if alone:
            alone_ms = median(alone)
            found[name] = {
                other: max(1.0, median(values) / alone_ms) for other, values in of.together_ms.items() if values
            }
    return {name: others for name, others in found.items() if others}


def modes_of_profile(
    engines: Iterable[Engine], carried: Mapping[str, Sequence[str]], samples: Mapping[str, EngineSamples]
) -> dict[str, dict[str, Any]]:
    """The profile of every mode. Modes on one engine run the same computation, so they get the same coefficients.

    carried: modes by engine. What reuse of prefixes saves is in the number of uncached tokens, not in the curve.
    """
    engines = tuple(engines)
    samples = _with_shared_prompts(engines, samples)
    found = {}
    for engine in engines:
        if samples[engine.name].usable:
            plain = samples.get(engine.plain) if engine.plain else None
            profile = mode_profile(engine, samples[engine.name], plain)
            found.update(dict.fromkeys(carried[engine.name], profile))
    return found


def _with_shared_prompts(engines: Sequence[Engine], samples: Mapping[str, EngineSamples]) -> dict[str, EngineSamples]:
    """Engines that differ by drafts alone read prompts alike: what was measured on one counts for all of them."""
    found = dict(samples)
    for name in {engine.plain for engine in engines if engine.plain}:
        if name not in samples:
            continue
        alike = [name, *(engine.name for engine in engines if engine.plain == name)]
        prefill_ms = _pooled(samples[one].prefill_ms for one in alike)
        prefill_j = _pooled(samples[one].prefill_j for one in alike)
        found |= {one: replace(found[one], prefill_ms=prefill_ms, prefill_j=prefill_j) for one in alike}
    return found


def _pooled(parts: Iterable[Samples]) -> Samples:
    together: Samples = {}
    for part in parts:
        for x, values in part.items():
            together.setdefault(x, []).extend(values)
    return together
