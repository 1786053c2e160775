"""The default policy: the mode with the lowest predicted cost under the request's objective.

Unlike the paper's rules it charges a choice with what it does under load: the batch joined, the engines that slow one
another, the delay to requests already running and to those still to come. Without a profile the rules decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

import msgspec

from app.routing.coefficients import ModeCoefficients, compile_profile
from app.routing.decision import Decision, Ineligible, LostBy, Outcome
from app.routing.eligibility import Eligibility, refusal
from app.routing.features import Objective, RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.consolidation import engine_for_all, expected_company
from app.routing.policies.engine_load import EngineLoad, engine_loads, hindrance
from app.routing.policies.prediction import Prediction, predict
from app.routing.policies.rules import RULES, RulesPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot

_Ranked = tuple[int, float, Prediction]
"""Rank first (0 is what the objective wants), then the score, lower is better."""
_BY_RANK = itemgetter(0, 1)
_BY_SCORE = itemgetter(1)
# Reading a member from its enumeration takes ten times as long as reading a global.
_LATENCY, _WEIGHTED = Objective.LATENCY, Objective.WEIGHTED


class CostPolicy:
    """Predicts every eligible mode's latency and energy and takes the best."""

    __slots__ = (
        "_by_engine",
        "_coefficients",
        "_eligibility",
        "_hindrance",
        "_profile_version",
        "_rules",
        "_settings",
        "_version",
    )

    name = "cost"

    def __init__(self, modes: Iterable[ModeInfo], settings: RoutingSettings, profile: Profile | None = None) -> None:
        self._eligibility = Eligibility(modes, settings, profile)
        self._rules = RulesPolicy("rules", RULES, self._eligibility.modes, settings, profile)
        self._settings = settings
        self._version = settings.version
        self._coefficients = {} if profile is None else compile_profile(profile, self._eligibility.modes)
        self._by_engine: dict[str, ModeCoefficients] = {}
        for known in self._coefficients.values():
            # Modes of an engine run alike; the one that reuses prefixes tells what all work on it would take.
            if known.mode.engine not in self._by_engine or known.mode.prefix_reuse:
                self._by_engine[known.mode.engine] = known
        self._profile_version = None if profile is None else profile.version
        self._hindrance = {} if profile is None else hindrance(profile.interference)

    def decide(
        self, features: RequestFeatures, snapshot: Snapshot, engines: Mapping[str, EngineLoad] | None = None
    ) -> Outcome:
        """`engines` are the `engine_loads` of this request under the policy's profile, where they are at hand."""
        if not self._coefficients:
            return self._leave_to_rules(features, snapshot)
        eligible, refused = self._eligibility.split(features, snapshot)
        if engines is None:
            engines = engine_loads(features, snapshot, self._hindrance)
        predictions = self._predict(eligible, engines, features, snapshot)
        if len(predictions) < len(eligible):
            if not predictions:
                return self._leave_to_rules(features, snapshot)
            for mode in eligible:
                if mode.name not in self._coefficients:
                    refused[mode.name] = Ineligible.UNPROFILED
        if self._settings.max_energy_ratio is not None:
            predictions = self._within_energy(predictions, refused, engines, features, snapshot)
        if not predictions:
            return refusal(self.name, self._version, features, refused)
        ranked = self._rank(predictions, features)
        # What is drawn for exploration may go to any engine, under load too.
        if features.wishes.objective is not _LATENCY or features.draw < self._settings.exploration_rate:
            return self._decision(ranked, features)
        best = ranked[0][2]
        company = expected_company(best, snapshot)
        if features.batch_size + company <= self._settings.consolidate_from:
            return self._decision(ranked, features)
        found = [entry[2] for entry in ranked]
        engine = engine_for_all(found, company, engines, self._by_engine, features, snapshot, self._hindrance)
        if engine is None or engine == best.mode.engine:
            return self._decision(ranked, features)
        kept = [entry for entry in ranked if entry[2].mode.engine == engine]
        return self._decision(kept, features, passed_over=ranked[0])

    def predictions(self, features: RequestFeatures, snapshot: Snapshot) -> dict[str, Prediction]:
        """Predicted cost of every eligible mode that the profile has, by name: for replay and training."""
        eligible, _ = self._eligibility.split(features, snapshot)
        engines = engine_loads(features, snapshot, self._hindrance)
        return {found.mode.name: found for found in self._predict(eligible, engines, features, snapshot)}

    def prediction(self, mode: str, features: RequestFeatures, snapshot: Snapshot) -> Prediction | None:
        """Predicted cost of one mode, eligible or not; None where the profile has none: for corrections."""
        known = self._coefficients.get(mode)
        if known is None or known.mode.engine not in snapshot.engines:
            return None
        return predict([known], engine_loads(features, snapshot, self._hindrance), features, snapshot)[0]

    def _predict(
        self,
        eligible: list[ModeInfo],
        engines: Mapping[str, EngineLoad],
        features: RequestFeatures,
        snapshot: Snapshot,
    ) -> list[Prediction]:
        known_of = self._coefficients.get
        known = [found for mode in eligible if (found := known_of(mode.name)) is not None]
        return predict(known, engines, features, snapshot)

    def _within_energy(
        self,
        predictions: list[Prediction],
        refused: dict[str, Ineligible],
        engines: Mapping[str, EngineLoad],
        features: RequestFeatures,
        snapshot: Snapshot,
    ) -> list[Prediction]:
        """Without the modes that need more energy than the reference, where the operator limits that."""
        reference = self._coefficients.get(self._settings.reference_mode)
        if reference is None or reference.mode.engine not in engines:
            return predictions
        base_j = predict([reference], engines, features, snapshot)[0].energy_j()
        if base_j is None:
            return predictions
        most_j = base_j * (self._settings.max_energy_ratio or 1.0)
        within = []
        for prediction in predictions:
            energy_j = prediction.energy_j()
            # Energy nobody has measured is no reason to refuse.
            if energy_j is None or energy_j <= most_j or prediction.mode is reference.mode:
                within.append(prediction)
            else:
                refused[prediction.mode.name] = Ineligible.ENERGY
        return within

    def _rank(self, predictions: list[Prediction], features: RequestFeatures) -> list[_Ranked]:
        others = self._settings.others_weight
        objective = features.wishes.objective
        if objective is _LATENCY:
            ranked = [(0, p.latency_ms + others * p.others_ms, p) for p in predictions]
            ranked.sort(key=_BY_SCORE)
            return ranked
        if objective is _WEIGHTED:
            ranked = self._weigh(predictions, features)
        else:
            limit_ms = features.wishes.latency_limit_ms if objective is Objective.LIMIT else None
            ranked = [_by_energy(p, limit_ms) for p in predictions]
        ranked.sort(key=_BY_RANK)
        return ranked

    def _weigh(self, predictions: list[Prediction], features: RequestFeatures) -> list[_Ranked]:
        """Both as ratios to the lowest among the modes; latency alone if some mode's energy is unknown."""
        weight = features.wishes.energy_weight
        if weight is None:
            weight = self._settings.energy_weight
        joules = [found for found in (p.energy_j() for p in predictions) if found is not None]
        if len(joules) < len(predictions):
            weight, joules = 0.0, [0.0] * len(predictions)
        others = self._settings.others_weight
        delays_ms = [p.latency_ms + others * p.others_ms for p in predictions]
        lowest_ms, lowest_j = max(1e-9, min(delays_ms)), max(1e-9, min(joules))
        return [
            (0, (1 - weight) * delay_ms / lowest_ms + weight * energy_j / lowest_j, prediction)
            for delay_ms, energy_j, prediction in zip(delays_ms, joules, predictions, strict=True)
        ]

    def _decision(
        self, ranked: list[_Ranked], features: RequestFeatures, passed_over: _Ranked | None = None
    ) -> Decision:
        """`passed_over` would have been the first, had the work not been put on one engine."""
        chosen = 0
        lost_by: LostBy | None = None
        rate = self._settings.exploration_rate
        explored = features.draw < rate
        if explored:
            chosen = min(len(ranked) - 1, int(features.draw / rate * len(ranked)))
            lost_by = LostBy.EXPLORATION
        elif len(ranked) > 1 and not ranked[0][2].mode.prefix_reuse:
            chosen = self._reusing_tie(ranked)
            lost_by = LostBy.PREFIX_REUSE if chosen else None
        _, score, best = ranked[chosen]
        runner_up = passed_over
        if passed_over is not None:
            lost_by = LostBy.CONSOLIDATION
        elif len(ranked) > 1:
            runner_up = ranked[1 if chosen == 0 else 0]
            lost_by = lost_by or _lost_by(ranked[chosen], runner_up, features.wishes.objective)
        return Decision(
            mode=best.mode.name,
            engine=best.mode.engine,
            request_class=features.request_class,
            policy=self.name,
            settings_version=self._version,
            profile_version=self._profile_version,
            terms=best.terms(score),
            runner_up=None if runner_up is None else runner_up[2].mode.name,
            runner_up_terms=None if runner_up is None else runner_up[2].terms(runner_up[1]),
            lost_by=lost_by if runner_up is not None else None,
            explored=explored,
        )

    def _reusing_tie(self, ranked: list[_Ranked]) -> int:
        """The place of a mode as good as the first, on its engine, that leaves its prefix for later requests.

        On one engine the two run the same way, so a small difference is noise of the measurement; on another it is not.
        """
        rank, score, best = ranked[0]
        most = score * (1.0 + self._settings.tie_margin)
        for place, (other_rank, other_score, other) in enumerate(ranked):
            if other_rank != rank or other_score > most:
                break
            if other.mode.prefix_reuse and other.mode.engine == best.mode.engine:
                return place
        return 0

    def _leave_to_rules(self, features: RequestFeatures, snapshot: Snapshot) -> Outcome:
        outcome = self._rules.decide(features, snapshot)
        return msgspec.structs.replace(outcome, stands_in_for=self.name) if isinstance(outcome, Decision) else outcome


def _by_energy(prediction: Prediction, limit_ms: float | None) -> _Ranked:
    """Least energy; a mode of unknown energy after those, one beyond the latency limit last, fastest first."""
    if limit_ms is not None and prediction.latency_ms > limit_ms:
        return 2, prediction.latency_ms, prediction
    energy_j = prediction.energy_j()
    if energy_j is None:
        return 1, prediction.latency_ms, prediction
    return 0, energy_j, prediction


def _lost_by(chosen: _Ranked, runner_up: _Ranked, objective: Objective) -> LostBy:
    if chosen[1] == runner_up[1] and chosen[0] == runner_up[0]:
        return LostBy.ORDER
    if objective is _WEIGHTED:
        return LostBy.SCORE
    if runner_up[0] == 2 and chosen[0] < 2:
        return LostBy.LATENCY_LIMIT
    if chosen[0] == 0 and objective is not _LATENCY:
        return LostBy.ENERGY
    better, worse = chosen[2], runner_up[2]
    differences = (
        worse.queue_ms - better.queue_ms,
        worse.prefill_ms - better.prefill_ms,
        worse.decode_ms - better.decode_ms,
        worse.interference_ms - better.interference_ms,
        worse.others_ms - better.others_ms,
        worse.wake_ms - better.wake_ms,
    )
    return _TERMS[differences.index(max(differences))]


_TERMS = (LostBy.QUEUE, LostBy.PREFILL, LostBy.DECODE, LostBy.INTERFERENCE, LostBy.OTHERS, LostBy.WAKE)
