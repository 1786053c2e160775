"""Logged decisions asked again of other policies, or of the same one. Pure: decisions in, tallies out.

Tallies of several processes add up, so that a large ledger is replayed in pieces.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import ValidationError

from app.routing.coefficients import ModeCoefficients, compile_profile
from app.routing.decision import Decision, Outcome
from app.routing.mode_info import ModeInfo
from app.routing.policies import Policy, make_policy
from app.routing.policies.cost import CostPolicy
from app.routing.policies.engine_load import EngineLoad, Hindrance, engine_loads, hindrance
from app.routing.policies.learned import LearnedPolicy, Predictor
from app.routing.policies.prediction import predict
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from loadgen.logged_decisions import LoggedDecision, Row, Shared, decode

LEARNED = LearnedPolicy.name
_LISTED = 100
"""Mismatches and damaged rows that are kept word for word; the rest are counted."""


@dataclass(slots=True)
class PairedMean:
    """Means of the policy's mode and of the executed one over the requests where both can be predicted."""

    n: int = 0
    policy_sum: float = 0.0
    executed_sum: float = 0.0

    def add(self, policy: float, executed: float) -> None:
        self.n += 1
        self.policy_sum += policy
        self.executed_sum += executed

    def merge(self, other: "PairedMean") -> None:
        self.n += other.n
        self.policy_sum += other.policy_sum
        self.executed_sum += other.executed_sum

    def as_json(self) -> dict[str, float | None]:
        return {
            "n": self.n,
            "policy_mean": self.policy_sum / self.n if self.n else None,
            "executed_mean": self.executed_sum / self.n if self.n else None,
            "ratio": self.policy_sum / self.executed_sum if self.executed_sum else None,
        }


@dataclass(slots=True)
class PolicyTally:
    """What one policy would have done. `failures`: why it could not be asked, by message."""

    asked: int = 0
    agreed: int = 0
    choices: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    latency_ms: PairedMean = field(default_factory=PairedMean)
    energy_j: PairedMean = field(default_factory=PairedMean)

    def merge(self, other: "PolicyTally") -> None:
        self.asked += other.asked
        self.agreed += other.agreed
        for name in ("choices", "refusals", "failures"):
            getattr(self, name).update(getattr(other, name))
        self.latency_ms.merge(other.latency_ms)
        self.energy_j.merge(other.energy_j)

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "agreed": self.agreed,
            "choices": dict(self.choices),
            "refusals": dict(self.refusals),
            "failures": dict(self.failures),
            "predicted_latency_ms": self.latency_ms.as_json(),
            "predicted_energy_j": self.energy_j.as_json(),
        }


class Cost(NamedTuple):
    """What the profile predicts for one mode; energy is None where it was not measured."""

    latency_ms: float
    energy_j: float | None


class Mismatch(NamedTuple):
    """A decision that came out otherwise: the fields that differ, as `name: logged -> replayed`."""

    request_id: str
    policy: str
    differences: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """A replay's outcome. Of mismatches and damage the first hundred of each piece are kept word for word."""

    rows: int = 0
    undecided: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    executed: Counter[str] = field(default_factory=Counter)
    policies: dict[str, PolicyTally] = field(default_factory=dict)
    verified: int = 0
    mismatched: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    unverifiable: Counter[str] = field(default_factory=Counter)

    def merge(self, other: "Tally") -> None:
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(ours, int):
                setattr(self, item.name, ours + theirs)
            elif isinstance(ours, Counter):
                ours.update(theirs)
        self.mismatches = (self.mismatches + other.mismatches)[:_LISTED]
        for name, tally in other.policies.items():
            self.policies.setdefault(name, PolicyTally()).merge(tally)


class SetupMissing(ValueError):
    """A row says neither with which settings nor over which modes it was decided, and nobody else does."""


class Unverifiable(ValueError):
    """What a decision was made with is not at hand; the message says what."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What stands in for what a ledger does not say, and the profiles by their versions.

    `profile` predicts costs and is what the replayed policies read; verification takes the one of each row's context,
    or else the one that the row names.
    """

    profile: Profile | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    settings: RoutingSettings | None = None
    modes: tuple[ModeInfo, ...] | None = None
    contexts: Mapping[bytes, Shared] = field(default_factory=dict)
    """The ledger's own, by name."""


class Replay:
    """Asks `policies` about every row given to `add`; with `verify` also each row's own policy.

    predictor: the trained model of `learned`; without one its decisions cannot be made again.
    """

    def __init__(
        self,
        policies: Sequence[str],
        defaults: Defaults,
        *,
        verify: bool = False,
        predictor: Predictor | None = None,
    ) -> None:
        self.tally = Tally(policies={name: PolicyTally() for name in policies})
        self._names = tuple(policies)
        self._defaults = defaults
        self._verify = verify
        self._predictor = predictor
        self._setups: dict[object, _Setup] = {}
        self._hindrance: Hindrance = {} if defaults.profile is None else hindrance(defaults.profile.interference)

    def add(self, row: Row) -> None:
        """Replays one row into the tally; a damaged one is counted there."""
        tally = self.tally
        tally.rows += 1
        try:
            logged = decode(row, self._defaults.contexts)
            if logged is None:
                tally.undecided += 1
            else:
                self._ask_all(logged, self._setup(logged))
        except ValueError as error:
            tally.damaged[str(error)] += 1
        except (ArithmeticError, LookupError) as error:
            # JSON of the right form with numbers that no live state can have, such as a negative load.
            tally.damaged[f"impossible values: {type(error).__name__}: {error}"] += 1

    def _ask_all(self, logged: LoggedDecision, setup: "_Setup") -> None:
        tally = self.tally
        costs = _Costs(logged, setup.coefficients, self._hindrance)
        for name, policy in setup.asked.items():
            _ask(tally.policies[name], policy, logged, costs)
        if self._verify:
            self._check(logged, setup)
        tally.executed[logged.executed or "refused"] += 1

    def _setup(self, logged: LoggedDecision) -> "_Setup":
        shared = logged.shared
        key = logged.context or (bytes(shared.settings), bytes(shared.modes))
        setup = self._setups.get(key)
        if setup is None:
            setup = self._setups[key] = _Setup(shared, self._defaults, self._predictor, self._names)
        return setup

    def _check(self, logged: LoggedDecision, setup: "_Setup") -> None:
        tally, outcome = self.tally, logged.outcome
        name = logged.logged.policy or outcome.policy
        try:
            profile = self._profile_of(logged, setup)
            if name == LEARNED:
                _check_trained_model(logged, self._predictor)
        except Unverifiable as why:
            tally.unverifiable[str(why)] += 1
            return
        policy = setup.policy(name, profile, named=logged.logged.named)
        if isinstance(policy, str):
            tally.unverifiable[policy] += 1
            return
        again = policy.decide(logged.features, logged.snapshot)
        tally.verified += 1
        if again != outcome:
            tally.mismatched += 1
            if len(tally.mismatches) < _LISTED:
                tally.mismatches.append(Mismatch(logged.request_id, policy.name, _differences(outcome, again)))

    def _profile_of(self, logged: LoggedDecision, setup: "_Setup") -> Profile | None:
        """The profile that this decision was made with. A refusal names none, so the context's comes first."""
        if isinstance(setup.profile, str):
            raise Unverifiable(setup.profile)
        if setup.profile is not None:
            return setup.profile
        version = logged.logged.profile_version
        if version is None and isinstance(logged.outcome, Decision) and logged.outcome.policy != LEARNED:
            version = logged.outcome.profile_version
        if version is None:
            return None
        profile = self._defaults.profiles.get(version)
        if profile is None:
            raise Unverifiable(f"profile {version} was not given")
        return profile


def _check_trained_model(logged: LoggedDecision, predictor: Predictor | None) -> None:
    """Raises Unverifiable where another trained model decided than the one at hand."""
    version = logged.shared.trained_model
    if version is None and isinstance(logged.outcome, Decision) and logged.outcome.policy == LEARNED:
        version = logged.outcome.profile_version
    if predictor is None or version not in (None, predictor.version):
        raise Unverifiable(f"trained model {version or 'of unknown version'} was not given: --trained-model FILE")


class _Setup:
    """Policies over one set of modes and settings; made once, for most rows share them.

    Raises:
        SetupMissing: neither the ledger nor the defaults say what decided.
        ValueError: the settings or modes are not of their form.
    """

    def __init__(self, shared: Shared, defaults: Defaults, predictor: Predictor | None, asked: Sequence[str]) -> None:
        settings, modes, profile = map(bytes, (shared.settings, shared.modes, shared.profile))
        self._settings = _given(
            "settings", defaults.settings if settings == _NULL else RoutingSettings.model_validate_json(settings)
        )
        self._modes = _given(
            "modes", defaults.modes if modes == _NULL else msgspec.json.decode(modes, type=tuple[ModeInfo, ...])
        )
        self.profile = None if profile == _NULL else _profile(profile)
        """The one that the context holds, or in words why it cannot be read."""
        self.coefficients = {} if defaults.profile is None else compile_profile(defaults.profile, self._modes)
        self._predictor = predictor
        # A ledger that does not say what served leaves it to the trained model.
        self._model = shared.model or (predictor.model if predictor else "")
        self._hardware = shared.hardware or (predictor.hardware if predictor else "")
        self._policies: dict[tuple[str, str | None, bool], Policy | str] = {}
        self.asked = {name: self.policy(name, defaults.profile) for name in asked}
        """The policies that are asked about every row, by name; in words why there is none."""

    def policy(self, name: str, profile: Profile | None, *, named: bool = False) -> Policy | str:
        """The policy, or in words why there is none. `named`: of a request that would have this mode or none."""
        key = name, None if profile is None else profile.version, named
        found = self._policies.get(key)
        if found is None:
            try:
                if named:
                    mode = name.removeprefix("static:")
                    found = StaticPolicy(mode, self._modes, self._settings, fall_back=False)
                else:
                    found = make_policy(
                        name,
                        self._modes,
                        self._settings,
                        profile,
                        self._predictor,
                        model=self._model,
                        hardware=self._hardware,
                    )
            except ValueError as error:
                found = str(error)
            self._policies[key] = found
        return found


_NULL = b"null"
_Found = TypeVar("_Found")


def _profile(content: bytes) -> Profile | str:
    try:
        return Profile.model_validate_json(content)
    except ValidationError as error:
        return f"the profile in its context is no profile: {error.errors()[0]['msg']}"


def _given(what: str, found: _Found | None) -> _Found:
    if found is None:
        raise SetupMissing(f"the row names no {what}; give --{what} FILE")
    return found


class _Costs:
    """Predicted cost of one request by mode, each worked out when first asked for: most are not.

    All policies share what they are worked out from, which takes longer than most decisions.
    """

    __slots__ = ("_coefficients", "_engines", "_hindrance", "_known", "_logged")

    def __init__(
        self, logged: LoggedDecision, coefficients: Mapping[str, ModeCoefficients], hindrance: Hindrance
    ) -> None:
        self._logged, self._coefficients, self._hindrance = logged, coefficients, hindrance
        self._engines: Mapping[str, EngineLoad] | None = None
        self._known: dict[str, Cost | None] = {}

    def engines(self) -> Mapping[str, EngineLoad]:
        if self._engines is None:
            self._engines = engine_loads(self._logged.features, self._logged.snapshot, self._hindrance)
        return self._engines

    def note(self, decision: Decision) -> None:
        """Takes over what the cost policy predicted itself, from the same profile."""
        if decision.terms is not None:
            self._known[decision.mode] = Cost(decision.terms.latency_ms, decision.terms.energy_j)
        if decision.runner_up is not None and decision.runner_up_terms is not None:
            terms = decision.runner_up_terms
            self._known[decision.runner_up] = Cost(terms.latency_ms, terms.energy_j)

    def of(self, mode: str) -> Cost | None:
        """None for a mode without coefficients, or whose engine was not there."""
        known = self._known
        if mode not in known:
            known[mode] = self._predict(mode)
        return known[mode]

    def _predict(self, mode: str) -> Cost | None:
        known = self._coefficients.get(mode)
        if known is None:
            return None
        engines = self.engines()
        if known.mode.engine not in engines:
            return None
        found = predict([known], engines, self._logged.features, self._logged.snapshot)[0]
        return Cost(found.latency_ms, found.energy_j())


def _ask(tally: PolicyTally, policy: Policy | str, logged: LoggedDecision, costs: _Costs) -> None:
    if isinstance(policy, str):
        tally.failures[policy] += 1
        return
    if isinstance(policy, CostPolicy):
        outcome = policy.decide(logged.features, logged.snapshot, costs.engines())
        if isinstance(outcome, Decision):
            costs.note(outcome)
    else:
        outcome = policy.decide(logged.features, logged.snapshot)
    tally.asked += 1
    if not isinstance(outcome, Decision):
        tally.refusals[outcome.code.value] += 1
        tally.agreed += logged.executed is None
        return
    mode, executed = outcome.mode, logged.executed
    tally.choices[mode] += 1
    tally.agreed += mode == executed
    if executed is None:
        return
    ours = costs.of(mode)
    theirs = ours if mode == executed else costs.of(executed)
    if ours is None or theirs is None:
        return
    tally.latency_ms.add(ours.latency_ms, theirs.latency_ms)
    if ours.energy_j is not None and theirs.energy_j is not None:
        tally.energy_j.add(ours.energy_j, theirs.energy_j)


def _differences(logged: Outcome, again: Outcome) -> tuple[str, ...]:
    left, right = _flat(logged), _flat(again)
    names: Iterable[str] = dict.fromkeys((*left, *right))
    return tuple(
        f"{name}: {left.get(name)} -> {right.get(name)}" for name in names if left.get(name) != right.get(name)
    )


def _flat(outcome: Outcome) -> dict[str, Any]:
    """Fields by dotted name, so that one differing term does not print all of them."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(outcome).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat
