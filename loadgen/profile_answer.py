"""A profile in plain words: which mode wins where, what routing gains here, and whether it is worth it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from app.routing.classes import BatchPressure, classify, output_shape, prefill_score, prompt_shape
from app.routing.coefficients import ModeCoefficients, compile_profile
from app.routing.eligibility import Eligibility
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.base import Policy
from app.routing.policies.cost import CostPolicy
from app.routing.policies.engine_load import engine_loads
from app.routing.policies.prediction import predict
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot
from app.routing.tags import Tag
from loadgen.recipe import Recipe, RequestKind, Slot, trace_of
from loadgen.routing_simulation import SimulatedRequest, simulate

_SIMULATED = 240
_LIGHT_SHARE = 0.2
"""The light rate, as a share of the rate at which one engine without batching would just be busy."""
_AT_ONCE_PER_S = 1e6
_TAGS = {"choice": Tag.MULTIPLE_CHOICE, "rewriting": Tag.REWRITING}
_WORTH_IT = 0.05
_NOISE = 0.03
"""A smaller difference between two modes may be the measurement's."""


@dataclass(frozen=True, slots=True)
class ClassWinner:
    """Predicted latency of every mode for one kind of request on idle engines, in ms."""

    latency_ms: dict[str, float]
    allowed: frozenset[str]
    """Modes that the quality gate lets serve it."""

    @property
    def best(self) -> str:
        """The fastest of the allowed modes; of modes that are equally fast the first."""
        return min((mode for mode in self.latency_ms if mode in self.allowed), key=self.latency_ms.__getitem__)

    @property
    def fastest(self) -> str:
        """The fastest whatever its quality."""
        return min(self.latency_ms, key=self.latency_ms.__getitem__)


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean latencies of a simulated load, in ms: `cost` and every static mode that may serve all requests."""

    rate_per_s: float
    cost_ms: float
    static_ms: dict[str, float]

    @property
    def best_static(self) -> str:
        return min(self.static_ms, key=self.static_ms.__getitem__)

    @property
    def saved(self) -> float:
        """Share of the best static mode's mean latency that routing saves; negative where it costs."""
        return 1.0 - self.cost_ms / self.static_ms[self.best_static]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a calibration tells its user."""

    winners: dict[str, ClassWinner]
    light: Gain
    saturating: Gain
    unproven: tuple[str, ...]
    """Modes that the quality gate admits to no kind of request."""


def answer(profile: Profile, modes: Sequence[ModeInfo], recipe: Recipe, settings: RoutingSettings) -> Answer:
    """From a profile and the modes that it is for. Raises ValueError where the profile has none of them."""
    measured = [mode for mode in modes if mode.name in profile.modes]
    if not measured:
        raise ValueError("the profile has none of the served modes")
    coefficients = compile_profile(profile, measured)
    winners = {
        name: _winner(features_of(kind), measured, coefficients, profile, settings)
        for name, kind in recipe.classes.items()
    }
    allowed = [mode for mode in measured if all(mode.name in winner.allowed for winner in winners.values())]
    service_s = fmean(winner.latency_ms[measured[0].name] for winner in winners.values()) / 1000
    load = _Load(measured, allowed or measured[:1], coefficients, profile, recipe, settings)
    admitted = set().union(*(winner.allowed for winner in winners.values()))
    unproven = tuple(mode.name for mode in measured if mode.name not in admitted)
    return Answer(winners, load.gain(_LIGHT_SHARE / service_s), load.gain(load.capacity_per_s()), unproven)


def features_of(kind: RequestKind, slot: Slot | None = None) -> RequestFeatures:
    """What the controller would measure of such a request on an idle device."""
    tag = _TAGS.get(kind.kind, Tag.NONE)
    shared = kind.kind == "shared_prefix" and slot is not None
    score = prefill_score(kind.prompt_tokens, kind.output_tokens, False)
    return RequestFeatures(
        prompt_tokens=kind.prompt_tokens,
        expected_output_tokens=kind.output_tokens,
        max_tokens=kind.output_tokens,
        shared_prefix=shared,
        tag=tag,
        prompt_shape=prompt_shape(kind.prompt_tokens),
        output_shape=output_shape(kind.output_tokens),
        prefill_score=score,
        request_class=classify(BatchPressure.LOW, shared, False, tag, kind.prompt_tokens, kind.output_tokens, score),
    )


def _idle(modes: Sequence[ModeInfo]) -> Snapshot:
    return Snapshot(engines={mode.engine: EngineView(engine=mode.engine) for mode in modes})


def _winner(
    features: RequestFeatures,
    modes: Sequence[ModeInfo],
    coefficients: Mapping[str, ModeCoefficients],
    profile: Profile,
    settings: RoutingSettings,
) -> ClassWinner:
    snapshot = _idle(modes)
    found = predict(coefficients.values(), engine_loads(features, snapshot, {}), features, snapshot)
    eligible, _ = Eligibility(modes, settings, profile).split(features, snapshot)
    allowed = frozenset(mode.name for mode in eligible) or frozenset({modes[0].name})
    return ClassWinner({one.mode.name: one.latency_ms for one in found}, allowed)


@dataclass(frozen=True, slots=True)
class _Load:
    """Simulated loads of a recipe's mix."""

    modes: Sequence[ModeInfo]
    allowed: Sequence[ModeInfo]
    """Modes that may serve all of it."""
    coefficients: Mapping[str, ModeCoefficients]
    profile: Profile
    recipe: Recipe
    settings: RoutingSettings

    def gain(self, rate_per_s: float) -> Gain:
        cost = CostPolicy(self.modes, self.settings, self.profile)
        return Gain(
            rate_per_s,
            fmean(self._latencies_ms(cost, rate_per_s)),
            {mode.name: fmean(self._latencies_ms(self._static(mode), rate_per_s)) for mode in self.allowed},
        )

    def capacity_per_s(self) -> float:
        """Requests per second that the best single mode finishes when it never has to wait for one."""
        ends_ms = (max(self._latencies_ms(self._static(mode), _AT_ONCE_PER_S)) for mode in self.allowed)
        return 1000 * _SIMULATED / min(ends_ms)

    def _static(self, mode: ModeInfo) -> Policy:
        return StaticPolicy(mode.name, self.modes, self.settings, fall_back=False)

    def _latencies_ms(self, policy: Policy, rate_per_s: float) -> list[float]:
        slots = trace_of(self.recipe, rate_per_s, _SIMULATED, 0)
        requests = [_simulated(self.recipe.classes[slot.name], slot) for slot in slots]
        served = simulate(requests, policy, self.coefficients, self.profile.interference)
        return [one.latency_ms for one in served if one.latency_ms is not None]


def _simulated(kind: RequestKind, slot: Slot) -> SimulatedRequest:
    # The last sentence is the question, which differs.
    shared = max(0, kind.prompt_tokens - 64) if slot.conversation is not None else 0
    return SimulatedRequest(slot.due_s, features_of(kind, slot), slot.conversation, shared)


def table_of(found: Answer) -> Table:
    """One line a kind of request, one column a mode: predicted latency on idle engines, the winner marked."""
    modes = list(next(iter(found.winners.values())).latency_ms)
    table = Table(title="Predicted latency on idle engines, ms (* best; in brackets: not admitted for its quality)")
    table.add_column("requests")
    for mode in modes:
        table.add_column(mode, justify="right")
    for name, winner in found.winners.items():
        cells = []
        for mode in modes:
            figure = f"{winner.latency_ms[mode]:.0f}" + (" *" if mode == winner.best else "")
            cells.append(figure if mode in winner.allowed else f"({figure})")
        table.add_row(name.replace("_", " "), *cells)
    return table


def words_of(found: Answer) -> list[str]:
    """The answer in sentences."""
    sentences = [f"{name.replace('_', ' ')}: {_winner_words(winner)}" for name, winner in found.winners.items()]
    sentences += [_gain_words("At a light load", found.light), _gain_words("Saturated", found.saturating)]
    if found.unproven:
        sentences.append(
            f"Left out for want of quality evidence: {', '.join(found.unproven)}. Measure it and calibrate again with "
            "--quality FILE, or name them in accepted_modes."
        )
    sentences.append(_verdict(found))
    return sentences


def _winner_words(winner: ClassWinner) -> str:
    best_ms = winner.latency_ms[winner.best]
    text = f"{winner.best} is fastest ({best_ms:.0f} ms)"
    # Modes of one engine have the same figures: they are not rivals.
    near = [
        mode
        for mode, ms in winner.latency_ms.items()
        if mode in winner.allowed and best_ms < ms <= (1 + _NOISE) * best_ms
    ]
    if near:
        text += f", {' and '.join(near)} within {100 * _NOISE:.0f} %"
    if winner.latency_ms[winner.fastest] < (1 - _NOISE) * best_ms:
        text += f"; {winner.fastest} would be faster, but no measured quality admits it"
    return f"{text}."


def _gain_words(when: str, gain: Gain) -> str:
    best = gain.best_static
    change = f"{100 * abs(gain.saved):.0f} % {'less' if gain.saved >= 0 else 'more'}"
    return (
        f"{when} ({gain.rate_per_s:.2g} requests/s of this mix): routing by cost is predicted to take "
        f"{gain.cost_ms:.0f} ms on average, {change} than always {best} ({gain.static_ms[best]:.0f} ms), "
        "the best single mode."
    )


def _verdict(found: Answer) -> str:
    light, saturating = found.light.saved, found.saturating.saved
    if light >= _WORTH_IT and saturating >= -_WORTH_IT:
        return "Routing is worth it here: requests differ in what serves them best. Check with `compare`."
    if light >= _WORTH_IT:
        return "Routing is worth it while the load is light; saturated, one mode serves better. Check with `compare`."
    if saturating >= _WORTH_IT:
        return "Routing is worth it under load. Check with `compare`."
    return f"Routing gains little here: always {found.light.best_static} is as good, and simpler."
