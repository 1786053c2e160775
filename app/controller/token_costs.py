"""What the profile says of an engine's joules, in the form the energy meter splits them by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.energy.attribution import TokenWeights
from app.modes import EngineSpec
from app.routing.profile import ModeProfile, Profile


class TokenCosts(NamedTuple):
    """By engine, for those that were measured: joules per token, and watts above idle while it decodes."""

    tokens: dict[str, TokenWeights]
    watts: dict[str, float]


def token_costs(profile: Profile | None, engines: Iterable[EngineSpec]) -> TokenCosts:
    """Costs of each engine from the first of its modes whose joules are in the profile.

    Joules are split only where requests share their steps, so the longest prompt and the largest batch count.
    """
    costs = TokenCosts({}, {})
    for engine in engines if profile is not None else ():
        assert profile is not None
        for mode in engine.modes:
            measured = profile.modes.get(mode.name)
            if measured is not None and (weights := _weights(measured)) is not None:
                costs.tokens[engine.name] = weights
                if watts := _watts(measured):
                    costs.watts[engine.name] = watts
                break
    return costs


def _weights(mode: ModeProfile) -> TokenWeights | None:
    if mode.prefill_j is None or mode.decode_j_per_token is None:
        return None
    prompt_tokens, prompt_j = mode.prefill_j[-1]
    weights = TokenWeights(prompt_j / prompt_tokens, mode.decode_j_per_token[-1][1])
    # A cost of nothing was too small to be measured, and is no weight.
    return weights if min(weights) > 0 else None


def _watts(mode: ModeProfile) -> float | None:
    """Joules of a decode step over its time; None where the batch was not timed."""
    assert mode.decode_j_per_token is not None
    batch, token_j = mode.decode_j_per_token[-1]
    if not (step_ms := dict(mode.step_ms).get(batch)):
        return None
    steps_per_token = mode.speculation.steps_per_token(mode.speculation.default) if mode.speculation else 1.0
    return token_j * batch / (steps_per_token * step_ms / 1e3)
