"""When a busy device serves faster with all its work on one engine.

A request compares what it and those already running would suffer. It cannot see the ones that are still to come: under
a heavy load every engine always has somebody to wait for, each new request lengthens that by little, and all engines
stay active, slowing one another and decoding in small batches. So once there is company, present or expected, the
policy asks of all requests together what it asks of one: would they be done sooner on one engine?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from app.routing.coefficients import MAX_BATCH, ModeCoefficients
from app.routing.policies.engine_load import EngineLoad, Hindrance
from app.routing.policies.prediction import Prediction, accepted_per_step
from app.routing.snapshot import EngineView, Snapshot

_AHEAD = 3.0
"""Company is expected for so many times as long as the request takes: those that join it are joined by others."""
_CLEARLY = 1.1
"""Another engine must be better by this factor to be changed to: that costs a time in which both run."""


def expected_company(best: Prediction, snapshot: Snapshot) -> float:
    """Requests that will come while `best`, and what it starts, is under way."""
    return _AHEAD * snapshot.arrivals_per_s * best.latency_ms / 1000.0


def one_engine(
    best: Prediction,
    company: float,
    predictions: Iterable[Prediction],
    engines: Mapping[str, EngineLoad],
    known: Mapping[str, ModeCoefficients],
    snapshot: Snapshot,
    hindrance: Hindrance,
) -> str | None:
    """The engine that all work should go to from this request on; None when it is better spread, or goes there anyway.

    best: the mode that the request would go to by itself. company: requests that are still to come. predictions: of
    the modes that may serve it, the best first. known: coefficients by engine. All but this one are taken to be as
    requests are lately, decoded in the batches that they would make.
    """
    here = best.mode.engine
    loads = {name: engine.load for name, engine in engines.items() if engine.load}
    own_ms: dict[str, float] = {}
    for found in predictions:
        own_ms.setdefault(found.mode.engine, found.latency_ms)
    if not {*loads, here} <= known.keys():
        return None
    usual = {name: usual_request(known[name], engines[name].view, snapshot) for name in {**own_ms, **loads}}

    def usual_ms(name: str, requests: float) -> float:
        return time_ms(known[name], usual[name], requests, engines[name].view)

    if not loads:
        each_ms = {name: usual_ms(name, 1.0 + company) / (1.0 + company) for name in own_ms}
        begun_ms = {name: own_ms[name] + company * _joining_ms(name, each_ms, hindrance) for name in own_ms}
        chosen = min(begun_ms, key=begun_ms.__getitem__)
        return chosen if begun_ms[chosen] < begun_ms[here] else None
    present = max(loads, key=loads.__getitem__)
    loads[here] = loads.get(here, 0) + 1
    requests = sum(loads.values())
    growth = (requests + company) / requests
    together_ms = {name: usual_ms(name, requests * growth) for name in own_ms}
    chosen = min(together_ms, key=together_ms.__getitem__)
    # It stays where most of the work is unless another engine is clearly better.
    if together_ms.get(present, math.inf) <= _CLEARLY * together_ms[chosen]:
        chosen = present
    if chosen == here:
        return None
    # Engines that run at once share the device: each takes its own time, slowed by the others, all at the same time.
    spread_ms = 0.0
    for name, load in loads.items():
        others = hindrance.get(name, {})
        slowdown = 1.0 + sum(others[other][0] for other in loads if other in others)
        spread_ms += slowdown * usual_ms(name, load * growth)
    return chosen if together_ms[chosen] < spread_ms / len(loads) else None


def _joining_ms(begun: str, each_ms: Mapping[str, float], hindrance: Hindrance) -> float:
    """What a later request takes of everybody's time when `begun` is at work: on that engine, or beside it."""
    beside = hindrance.get(begun, {})
    least_ms = each_ms[begun]
    for name, own_ms in each_ms.items():
        if name != begun:
            least_ms = min(least_ms, own_ms * (1.0 + sum(beside.get(name, ()))))
    return least_ms


class UsualRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of the usual size on one engine, with the engine's corrections."""

    prompt_ms: float
    steps: float


def time_ms(known: ModeCoefficients, usual: UsualRequest, requests: float, view: EngineView) -> float:
    """Time of an engine for so many usual requests, on average, decoded in one batch or several after another."""
    batch = max(1, min(round(requests), view.max_running, MAX_BATCH))
    return requests * (usual.prompt_ms + usual.steps / batch * known.step_ms[batch])


def usual_request(known: ModeCoefficients, view: EngineView, snapshot: Snapshot) -> UsualRequest:
    """What requests are like lately, on this engine. A step that is slower than in the profile counts as more.

    Speculation makes several tokens in a step of one kind of text and none of another, so the mixture decides.
    """
    mode, corrections, shares = known.mode, snapshot.corrections, snapshot.mean_output_shares
    correction = corrections.get(mode.engine, 1.0)
    prompt_tokens = snapshot.mean_prompt_tokens
    if mode.prefix_reuse:
        prompt_tokens -= snapshot.mean_seen_tokens
    prompt_ms = known.prefill_ms_per_token * prompt_tokens * correction
    if not shares or not (corrections or mode.speculative):
        default = known.steps_per_token(known.accepted_default) if mode.speculative else 1.0
        return UsualRequest(prompt_ms, snapshot.mean_output_tokens * correction * default)
    of_tag = mode.engine + ":"
    steps = 0.0
    for tag, share in shares.items():
        step = share * corrections.get(of_tag + tag, correction)
        if mode.speculative:
            step *= known.steps_per_token(accepted_per_step(known, view, tag, snapshot))
        steps += step
    return UsualRequest(prompt_ms, snapshot.mean_output_tokens * steps)
