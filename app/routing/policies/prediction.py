"""What one mode would cost for one request: the formula of the cost policy, term by term.

latency = queue + (prefill of uncached tokens + decode in the batch it joins) * (1 + slowdown by others) [+ wake-up]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from app.routing.coefficients import ModeCoefficients
from app.routing.decision import CostTerms
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.engine_load import EngineLoad
from app.routing.snapshot import EngineView, Snapshot

UNKNOWN_WAKE_MS = 5_000.0
"""A wake-up nobody has measured: dear enough not to be tried while something else is awake."""


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Predicted latency of `mode` in milliseconds; fields as in `CostTerms`. Energy is worked out when asked for."""

    mode: ModeInfo
    latency_ms: float
    others_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    interference_ms: float
    wake_ms: float
    correction: float
    coefficients: ModeCoefficients
    uncached_tokens: int
    output_tokens: int
    """Of each of its `sequences`."""
    sequences: int
    batch: int

    def energy_j(self) -> float | None:
        """Predicted joules of the request; None where they were not measured."""
        known = self.coefficients
        if known.prefill_j is None or known.decode_j is None:
            return None
        decoded_tokens = (self.output_tokens - 1) * self.sequences
        joules = known.prefill_j(self.uncached_tokens) + decoded_tokens * known.decode_j[self.batch]
        return joules + (known.wake_j or 0.0) if self.wake_ms else joules

    def terms(self, score: float) -> CostTerms:
        return CostTerms(
            queue_ms=self.queue_ms,
            prefill_ms=self.prefill_ms,
            decode_ms=self.decode_ms,
            interference_ms=self.interference_ms,
            others_ms=self.others_ms,
            wake_ms=self.wake_ms,
            correction=self.correction,
            latency_ms=self.latency_ms,
            energy_j=self.energy_j(),
            score=score,
        )


def predict(
    coefficients: Iterable[ModeCoefficients],
    engines: Mapping[str, EngineLoad],
    features: RequestFeatures,
    snapshot: Snapshot,
) -> list[Prediction]:
    """The cost of serving the request with each mode on its engine as it is; in the order given.

    One loop with everything that modes share outside it: this is most of what a decision costs. Modes that run alike
    and compute as many tokens cost the same, and where they follow one another it is worked out once.
    """
    prompt_tokens = features.prompt_tokens
    output_tokens = features.expected_output_tokens
    sequences = features.sequences
    cached_tokens = features.cached_tokens
    found: list[Prediction] = []
    before: Prediction | None = None
    for known in coefficients:
        mode = known.mode
        uncached_tokens = prompt_tokens
        if cached_tokens and mode.prefix_reuse:
            uncached_tokens = max(1, prompt_tokens - cached_tokens.get(mode.engine, 0))
        if (
            before is not None
            and before.coefficients.runs_as is known.runs_as
            and before.uncached_tokens == uncached_tokens
        ):
            found.append(replace(before, mode=mode, coefficients=known))
            continue
        engine = engines[mode.engine]
        batch = engine.batch
        # The prefill yields the first token.
        steps = output_tokens - 1.0
        if mode.speculative:
            steps *= known.steps_per_token(accepted_per_step(known, engine.view, features.tag, snapshot))
        correction = engine.correction
        prefill_ms = known.prefill_ms(uncached_tokens) * correction
        decode_ms = steps * known.step_ms[batch] * correction
        own_ms = prefill_ms + decode_ms
        queue_ms = others_ms = wake_ms = 0.0
        if engine.load:
            left_tokens = engine.left_tokens or output_tokens
            # Prompts ahead of it, then a place in the batch.
            queue_ms = engine.view.pending_prefill_tokens * known.prefill_ms_per_token
            if engine.wait_share:
                queue_ms += engine.wait_share * left_tokens * known.step_ms[batch]
            queue_ms *= 1.0 + engine.slowdown
            # Those in this batch wait for the prefill once, and make slower steps while both run.
            growth_ms = known.step_growth_ms[batch] * sequences
            both_tokens = left_tokens if left_tokens < steps else steps
            longer_ms = growth_ms * both_tokens + prefill_ms
            others_ms = engine.running * longer_ms
            # The engine works for so much longer: while both run, and for this request alone once the others are done.
            longer_ms += (steps - both_tokens) * known.step_ms[1]
        else:
            longer_ms = own_ms
        # Meanwhile it takes the device's time from the other engines: from those that run there now, and when they
        # are done from those that wait, so it does not matter how long each of them has left.
        others_ms += engine.burden * longer_ms
        interference_ms = own_ms * engine.slowdown
        if engine.asleep:
            wake_ms = engine.view.wake_ms or known.wake_ms or UNKNOWN_WAKE_MS
        before = Prediction(
            mode,
            queue_ms + own_ms + interference_ms + wake_ms,
            others_ms,
            queue_ms,
            prefill_ms,
            decode_ms,
            interference_ms,
            wake_ms,
            correction,
            known,
            uncached_tokens,
            output_tokens,
            sequences,
            batch,
        )
        found.append(before)
    return found


def accepted_per_step(known: ModeCoefficients, view: EngineView, tag: str, snapshot: Snapshot) -> float:
    """Learned for this mode and tag; else the profile's for the tag; else the engine's latest; else the default."""
    accepted = snapshot.accepted_per_step.get(known.mode.name + ":" + tag)
    if accepted is None:
        accepted = known.accepted.get(tag)
    if accepted is None and not snapshot.stale(view):
        accepted = view.accepted_per_step
    return known.accepted_default if accepted is None else accepted
