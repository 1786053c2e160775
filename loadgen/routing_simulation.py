"""Plays requests through a routing policy on engines that are as fast as a profile says. Pure: no server, no clock.

An engine reads prompts one after another while its streams wait, then decodes all of them in one batch; engines that
are active together slow one another as measured. That is the picture the cost policy has too, so a simulation tells
what its choices are worth if the profile is right, and nothing of what the profile does not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from app.routing.coefficients import MAX_BATCH, ModeCoefficients
from app.routing.decision import Decision
from app.routing.features import RequestFeatures
from app.routing.policies.base import Policy
from app.routing.policies.engine_load import Interference
from app.routing.snapshot import EngineView, Snapshot
from app.routing.traffic import Traffic


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request, when it comes, and the conversation whose beginning it shares (`shared_tokens` of its prompt)."""

    due_s: float
    features: RequestFeatures
    conversation: int | None = None
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one; `mode` and `latency_ms` are None where the policy refused it."""

    mode: str | None
    latency_ms: float | None


@dataclass(slots=True)
class _Job:
    place: int
    prefill_ms: float
    prompt_tokens: int
    steps: float
    tokens_per_step: float


@dataclass(slots=True)
class _EngineState:
    jobs: list[_Job] = field(default_factory=list)
    step_ms: Sequence[float] = ()

    def next_ms(self, slowdown: float) -> float:
        """Time until a prompt is read or a stream ends."""
        reading = next((job for job in self.jobs if job.prefill_ms > 0), None)
        if reading is not None:
            return reading.prefill_ms * slowdown
        return min(job.steps for job in self.jobs) * self._step_ms() * slowdown

    def advance(self, passed_ms: float, slowdown: float) -> None:
        reading = next((job for job in self.jobs if job.prefill_ms > 0), None)
        if reading is not None:
            left = reading.prefill_ms - passed_ms / slowdown
            reading.prefill_ms = left if left > 1e-6 else 0.0
            return
        done = passed_ms / slowdown / self._step_ms()
        for job in self.jobs:
            job.steps -= done

    def take_finished(self) -> list[_Job]:
        finished = [job for job in self.jobs if job.prefill_ms <= 0 and job.steps <= 1e-6]
        self.jobs = [job for job in self.jobs if job not in finished]
        return finished

    def _step_ms(self) -> float:
        return max(1e-3, self.step_ms[min(MAX_BATCH, len(self.jobs))])

    def view(self, name: str) -> EngineView:
        return EngineView(
            engine=name,
            in_flight=len(self.jobs),
            running=len(self.jobs),
            pending_prefill_tokens=sum(job.prompt_tokens for job in self.jobs if job.prefill_ms > 0),
            pending_output_tokens=round(sum(job.steps * job.tokens_per_step for job in self.jobs)),
            step_ms=self._step_ms() if self.jobs else None,
        )


def simulate(
    requests: Sequence[SimulatedRequest],
    policy: Policy,
    coefficients: Mapping[str, ModeCoefficients],
    interference: Interference,
) -> list[Served]:
    """What becomes of each request, in their order. requests: by rising `due_s`.

    The policy sees expected outputs that come true, and the prompt tokens that its engines still have cached.
    """
    engines = {known.mode.engine: _EngineState() for known in coefficients.values()}
    cached: dict[tuple[str, int], int] = {}
    seen: dict[int, int] = {}
    served = [Served(None, None)] * len(requests)
    now_ms, place = 0.0, 0
    traffic = Traffic()
    while place < len(requests) or any(engine.jobs for engine in engines.values()):
        active = {name: engine for name, engine in engines.items() if engine.jobs}
        slowdowns = {name: _slowdown(name, active, interference) for name in active}
        waits = [engine.next_ms(slowdowns[name]) for name, engine in active.items()]
        if place < len(requests):
            waits.append(requests[place].due_s * 1000 - now_ms)
        passed_ms = max(0.0, min(waits))
        now_ms += passed_ms
        for name, engine in active.items():
            engine.advance(passed_ms, slowdowns[name])
            for job in engine.take_finished():
                served[job.place] = Served(served[job.place].mode, now_ms - requests[job.place].due_s * 1000)
        while place < len(requests) and requests[place].due_s * 1000 <= now_ms + 1e-6:
            served[place] = _admit(place, requests[place], policy, coefficients, engines, cached, seen, traffic)
            place += 1
    return served


def _slowdown(name: str, active: Mapping[str, _EngineState], interference: Interference) -> float:
    others = interference.get(name, {})
    return 1.0 + sum(others.get(other, 1.0) - 1.0 for other in active if other != name)


def _admit(
    place: int,
    request: SimulatedRequest,
    policy: Policy,
    coefficients: Mapping[str, ModeCoefficients],
    engines: Mapping[str, _EngineState],
    cached: dict[tuple[str, int], int],
    seen: dict[int, int],
    traffic: Traffic,
) -> Served:
    found, seen_tokens = {}, 0
    if request.conversation is not None:
        found = _cached(request.conversation, engines, cached)
        seen_tokens = seen.get(request.conversation, 0)
        seen[request.conversation] = request.shared_tokens
    snapshot = Snapshot(
        engines={name: engine.view(name) for name, engine in engines.items()},
        mean_prompt_tokens=traffic.prompt_tokens,
        mean_seen_tokens=traffic.seen_tokens,
        mean_output_tokens=traffic.output_tokens,
        arrivals_per_s=traffic.arrivals_per_s(request.due_s),
        mean_output_shares=traffic.output_shares,
    )
    features = replace(
        request.features, cached_tokens=found, seen_tokens=seen_tokens, batch_size=1 + snapshot.total_load()
    )
    decision = policy.decide(features, snapshot)
    if not isinstance(decision, Decision) or decision.mode not in coefficients:
        return Served(None, None)
    known = coefficients[decision.mode]
    engine = known.mode.engine
    uncached = features.prompt_tokens
    if known.mode.prefix_reuse:
        uncached = max(1, uncached - found.get(engine, 0))
        if request.conversation is not None:
            cached[engine, request.conversation] = request.shared_tokens
    size = features.prompt_tokens, seen_tokens, features.expected_output_tokens
    traffic.add(*size, features.tag, request.due_s)
    tokens_per_step = 1.0
    if known.mode.speculative:
        tokens_per_step /= known.steps_per_token(known.accepted.get(features.tag, known.accepted_default))
    steps = max(0, features.expected_output_tokens - 1) / tokens_per_step
    engines[engine].step_ms = known.step_ms
    engines[engine].jobs.append(_Job(place, known.prefill_ms(uncached), uncached, steps, tokens_per_step))
    return Served(decision.mode, None)


def _cached(
    conversation: int, engines: Mapping[str, _EngineState], cached: Mapping[tuple[str, int], int]
) -> dict[str, int]:
    return {name: cached[name, conversation] for name in engines if (name, conversation) in cached}
