"""Which engine serves all best: the request, those that run already, and those that are still to come.

A request by itself compares what it and those already running would suffer. It cannot see what follows: an engine that
it begins on is one that later requests have to join or run beside. Where engines hinder one another, opening a second
one or leaving a busy one costs all of them; where they do not, it costs nothing. So the policy asks with which engine
the device would be done soonest with everything that is there and that is expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from app.routing.coefficients import MAX_BATCH, ModeCoefficients
from app.routing.corrections import engine_correction
from app.routing.features import RequestFeatures
from app.routing.policies.engine_load import Beside, EngineLoad, Hindrance
from app.routing.policies.prediction import Prediction, accepted_per_step
from app.routing.snapshot import EngineView, Snapshot

_AHEAD = 2.0
"""Company is expected for so many times as long as the request takes: those that join it are joined by others."""
_UNFORESEEN = 0.5
"""Requests expected beyond what the rate of arrivals promises: a burst comes unannounced, and meets what has begun."""
_OWN = 0.05
"""Weight of what the request and those there wait: of ways to be done equally soon, the one with the shorter waits."""
_COMES_AGAIN = 0.2
"""Share of prompt tokens expected to come again before that has been seen: a next turn brings all of its conversation.

Without it no engine that keeps prefixes is used until they have come again elsewhere. Simulated on the CPU preset's
recipe it saves up to a fifth of the mean latency under load, and costs 2 % where nothing ever comes again.
"""
_NOTHING: Mapping[str, Beside] = {}
_FREELY = Beside()


def expected_company(best: Prediction, snapshot: Snapshot) -> float:
    """Requests that will come while `best`, and what it starts, is under way; none where there never were any."""
    if not snapshot.mean_prompt_tokens:
        return 0.0
    return _UNFORESEEN + _AHEAD * snapshot.arrivals_per_s * best.latency_ms / 1000.0


def engine_for_all(
    predictions: Iterable[Prediction],
    company: float,
    engines: Mapping[str, EngineLoad],
    known: Mapping[str, ModeCoefficients],
    features: RequestFeatures,
    snapshot: Snapshot,
    hindrance: Hindrance,
) -> str | None:
    """The engine to serve the request, for all work to be done soonest; None where a busy engine was never measured.

    predictions: of the modes that may serve it, the best by itself first. company: requests that are still to come,
    taken to be as requests are lately. known: coefficients by engine.
    """
    own: dict[str, Prediction] = {}
    reusing: dict[str, Prediction] = {}
    for found in predictions:
        mode = found.mode
        if mode.engine not in own:
            own[mode.engine] = found
        if mode.prefix_reuse and mode.engine not in reusing:
            reusing[mode.engine] = found
    left_ms: dict[str, float] = {}
    here_ms: dict[str, float] = {}
    each_ms: dict[str, float] = {}
    for name, engine in engines.items():
        request, load = own.get(name), engine.load
        if request is None and not load:
            continue
        coefficients = known.get(name)
        if coefficients is None:
            return None
        usual = usual_request(coefficients, engine.view, snapshot)
        share_ms = coefficients.step_share_ms
        prompts_ms = steps = 0.0
        if load:
            prompts_ms = engine.view.pending_prefill_tokens * coefficients.prefill_ms_per_token
            steps = load * usual.steps_per_token * (engine.left_tokens or features.expected_output_tokens)
            left_ms[name] = prompts_ms + steps * share_ms[engine.running]
        if request is not None:
            batch = int(load + request.sequences + company + 0.5)
            most = engine.view.max_running
            if batch > most or batch > MAX_BATCH:
                batch = most if most < MAX_BATCH else MAX_BATCH
            step_ms = share_ms[batch]
            each_ms[name] = usual.prompt_ms + usual.steps * step_ms
            steps += request.decode_ms / coefficients.step_ms[request.batch] * request.sequences
            work_ms = prompts_ms + request.prefill_ms + steps * step_ms + request.wake_ms
            if engine.wait_share:
                left_tokens = engine.left_tokens or features.expected_output_tokens
                work_ms += engine.wait_share * left_tokens * usual.steps_per_token * coefficients.step_ms[batch]
            here_ms[name] = work_ms
    total_ms = {}
    for name, request in own.items():
        beside = hindrance.get(name, _NOTHING)
        work_ms = here_ms[name] + company * _joining_ms(name, each_ms, beside)
        waits_ms = request.latency_ms + request.others_ms
        total_ms[name] = work_ms + _beside_ms(name, work_ms, left_ms, beside) + _OWN * waits_ms
    if reusing:
        for name, saved_ms in _saved_later_ms(reusing, own, features, snapshot).items():
            total_ms[name] -= saved_ms
    return min(total_ms, key=total_ms.__getitem__)


def _joining_ms(begun: str, each_ms: Mapping[str, float], beside: Mapping[str, Beside]) -> float:
    """What a later request adds to everybody's time when `begun` is at work: on that engine, or on one beside it."""
    least_ms = each_ms[begun]
    for other, ms in each_ms.items():
        if other != begun:
            added_ms = ms * beside.get(other, _FREELY).added
            if added_ms < least_ms:
                least_ms = added_ms
    return least_ms


def _beside_ms(name: str, work_ms: float, left_ms: Mapping[str, float], beside: Mapping[str, Beside]) -> float:
    """What the other engines have left, and what is lost or won by working beside them instead of after them."""
    total_ms = 0.0
    for other, ms in left_ms.items():
        if other != name:
            _, theirs, _, pace = beside.get(other, _FREELY)
            # Until one of them is done.
            both_ms = ms if ms * pace < work_ms else work_ms / pace
            total_ms += ms + both_ms * (theirs - pace)
    return total_ms


def _saved_later_ms(
    reusing: Mapping[str, Prediction], own: Mapping[str, Prediction], features: RequestFeatures, snapshot: Snapshot
) -> dict[str, float]:
    """What the next request with this prompt's beginning would save, by engine that reuses it and lacks it now."""
    # Of what is new as much will come again as has lately.
    new_tokens = features.prompt_tokens - features.seen_tokens
    again_tokens = features.seen_tokens + new_tokens * _comes_again(snapshot)
    elsewhere_ms = min(found.prefill_ms + found.decode_ms for found in own.values())
    saved_ms = {}
    for name, found in reusing.items():
        missing = again_tokens - features.cached_tokens.get(name, 0)
        if missing > 0.0:
            cached_ms = missing * found.coefficients.prefill_ms_per_token * found.correction
            saved_ms[name] = max(0.0, elsewhere_ms - (own[name].prefill_ms + own[name].decode_ms - cached_ms))
    return saved_ms


def _comes_again(snapshot: Snapshot) -> float:
    """Share of prompt tokens that begin a later prompt too."""
    if not snapshot.mean_prompt_tokens:
        return _COMES_AGAIN
    return max(_COMES_AGAIN, snapshot.mean_seen_tokens / snapshot.mean_prompt_tokens)


class UsualRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of the usual size on one engine, with the engine's corrections."""

    prompt_ms: float
    steps: float
    steps_per_token: float


def usual_request(known: ModeCoefficients, view: EngineView, snapshot: Snapshot) -> UsualRequest:
    """What requests are like lately, on this engine. A step that is slower than in the profile counts as more.

    Speculation makes several tokens in a step of one kind of text and none of another, so the mixture decides.
    """
    mode, corrections, shares = known.mode, snapshot.corrections, snapshot.mean_output_shares
    correction = engine_correction(corrections, mode.engine)
    prompt_tokens = snapshot.mean_prompt_tokens
    if mode.prefix_reuse:
        prompt_tokens *= 1.0 - _comes_again(snapshot)
    prompt_ms = known.prefill_ms_per_token * prompt_tokens * correction
    if not shares or not (corrections or mode.speculative):
        steps_per_token = correction
        if mode.speculative:
            steps_per_token *= known.steps_per_token(known.accepted_default)
    else:
        of_tag = mode.engine + ":"
        steps_per_token = 0.0
        for tag, share in shares.items():
            step = share * corrections.get(of_tag + tag, correction)
            if mode.speculative:
                step *= known.steps_per_token(accepted_per_step(known, view, tag, snapshot))
            steps_per_token += step
    return UsualRequest(prompt_ms, snapshot.mean_output_tokens * steps_per_token, steps_per_token)
