"""When a busy device serves faster with all its work on one engine.

A request compares what it and those already running would suffer. It cannot see the ones that are still to come: under
a heavy load every engine always has somebody to wait for, each new request lengthens that by little, and all engines
stay active, slowing one another and decoding in small batches. So from some load on the policy asks of all requests
together what it asks of one: would they be done sooner on one engine?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from app.routing.coefficients import MAX_BATCH, ModeCoefficients
from app.routing.policies.engine_load import EngineLoad, Interference
from app.routing.policies.prediction import Prediction, accepted_per_step
from app.routing.snapshot import EngineView, Snapshot

_CLEARLY = 1.2
"""A prediction must be better by this factor to be acted on: changing the engine costs a time in which both run."""


def one_engine(
    best: Prediction,
    eligible: Iterable[str],
    engines: Mapping[str, EngineLoad],
    known: Mapping[str, ModeCoefficients],
    snapshot: Snapshot,
    interference: Interference,
) -> str | None:
    """The engine that all work should go to from this request on; None when it is better spread.

    best: the mode that the request would go to by itself. eligible: engines of the modes that may serve it. known:
    coefficients by engine. Compared is how long as many requests as there are would take if all were as requests are
    lately, decoded in the batches that they would make.
    """
    loads = {name: engine.load for name, engine in engines.items() if engine.load}
    present = max(loads, key=loads.__getitem__, default=best.mode.engine)
    loads[best.mode.engine] = loads.get(best.mode.engine, 0) + 1
    if not loads.keys() <= known.keys():
        return None
    requests = sum(loads.values())
    together = {name: time_ms(known[name], requests, engines[name].view, snapshot) for name in eligible}
    chosen = min(together, key=together.__getitem__)
    # It stays where most of the work is unless another engine is clearly better.
    if together.get(present, math.inf) <= _CLEARLY * together[chosen]:
        chosen = present
    # Engines that run at once share the device: each takes its own time, slowed by the others, all at the same time.
    spread_ms = 0.0
    for name, load in loads.items():
        others = interference.get(name, {})
        slowdown = 1.0 + sum(others.get(other, 1.0) - 1.0 for other in loads if other != name)
        spread_ms += slowdown * time_ms(known[name], load, engines[name].view, snapshot) / len(loads)
    return chosen if _CLEARLY * together[chosen] < spread_ms else None


def time_ms(known: ModeCoefficients, requests: int, view: EngineView, snapshot: Snapshot) -> float:
    """Time of an engine for so many requests of the usual size, decoded in one batch or several after another."""
    batch = min(requests, view.max_running, MAX_BATCH)
    correction = snapshot.corrections.get(known.mode.engine, 1.0)
    prompts_ms = known.prefill_ms_per_token * snapshot.mean_prompt_tokens * correction
    steps = snapshot.mean_output_tokens * _steps_per_token(known, view, snapshot)
    return requests * (prompts_ms + steps / batch * known.step_ms[batch])


def _steps_per_token(known: ModeCoefficients, view: EngineView, snapshot: Snapshot) -> float:
    """Decode steps that a token of the usual mixture takes, a step that is slower than in the profile counting more.

    Speculation makes several tokens in a step of one kind of text and none of another, so the mixture decides.
    """
    corrections, speculative = snapshot.corrections, known.mode.speculative
    engine = known.mode.engine
    of_engine = corrections.get(engine, 1.0)
    if not snapshot.mean_output_shares:
        return of_engine * known.steps_per_token(known.accepted_default) if speculative else of_engine
    steps = 0.0
    for tag, share in snapshot.mean_output_shares.items():
        step = share * corrections.get(engine + ":" + tag, of_engine)
        steps += step * known.steps_per_token(accepted_per_step(known, view, tag, snapshot)) if speculative else step
    return steps
