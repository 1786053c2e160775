"""A trained model as a policy. The model is handed in as an object; this module knows no runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log1p
from typing import Protocol

import msgspec

from app.routing.decision import Decision, LostBy, Outcome
from app.routing.eligibility import Eligibility, refusal
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.rules import RULES, RulesPolicy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot
from app.routing.tags import Tag

_TAGS = tuple(tag for tag in Tag if tag is not Tag.NONE)

FEATURE_NAMES: tuple[str, ...] = (
    "prompt_tokens",
    "expected_output_tokens",
    "output_prompt_ratio",
    "log_prompt_tokens",
    "log_expected_output_tokens",
    "batch_size",
    "shared_prefix",
    "memory_pressure",
    "seen_tokens",
    "kv_use",
    "prefill_score",
    *(f"tag_{tag.value}" for tag in _TAGS),
)
"""The paper's features (its evaluation mode and benchmark family are the tags here) and live signals, in order."""


def feature_vector(features: RequestFeatures) -> list[float]:
    """The values of `FEATURE_NAMES`, for training and for serving alike."""
    tag = features.tag
    return [
        float(features.prompt_tokens),
        float(features.expected_output_tokens),
        features.output_prompt_ratio,
        log1p(features.prompt_tokens),
        log1p(features.expected_output_tokens),
        float(features.batch_size),
        float(features.shared_prefix),
        float(features.memory_pressure),
        float(features.seen_tokens),
        features.kv_use,
        float(features.prefill_score),
        *[1.0 if tag is one else 0.0 for one in _TAGS],
    ]


class Predictor(Protocol):
    """A trained model, with what it was trained for."""

    @property
    def version(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def feature_names(self) -> tuple[str, ...]: ...
    @property
    def modes(self) -> tuple[str, ...]: ...

    def scores(self, row: Sequence[float]) -> Sequence[float]:
        """One score per mode of `modes`, lower is better: predicted cost, or a probability negated."""


class PredictorRefused(ValueError):
    """The predictor was trained for something else. The message is for the operator."""


def check_predictor(predictor: Predictor, modes: Iterable[str], *, model: str, hardware: str) -> None:
    """Check that a predictor fits what is served.

    Raises:
        PredictorRefused: it was trained for other features, modes, another model or other hardware.
    """
    if tuple(predictor.feature_names) != FEATURE_NAMES:
        differing = sorted(set(predictor.feature_names) ^ set(FEATURE_NAMES)) or ["their order"]
        raise PredictorRefused(f"The trained model wants other features: {', '.join(differing)}.")
    missing = sorted(set(predictor.modes) - set(modes))
    if missing:
        raise PredictorRefused(f"The trained model chooses modes that are not deployed: {', '.join(missing)}.")
    for what, trained, served in (("model", predictor.model, model), ("hardware", predictor.hardware, hardware)):
        if trained != served:
            raise PredictorRefused(f"The trained model is for {what} {trained!r}, but {served!r} serves here.")


class LearnedPolicy:
    """The eligible mode with the best predicted score; the rules decide when the model knows none of the eligible."""

    __slots__ = ("_eligibility", "_predictor", "_rules", "_settings_version", "_version")

    name = "learned"

    def __init__(
        self,
        predictor: Predictor,
        modes: Iterable[ModeInfo],
        settings: RoutingSettings,
        profile: Profile | None,
        *,
        model: str,
        hardware: str,
    ) -> None:
        """`profile` is only read for the quality gate. Raises `PredictorRefused` as `check_predictor` does."""
        self._eligibility = Eligibility(modes, settings, profile)
        check_predictor(predictor, [mode.name for mode in self._eligibility.modes], model=model, hardware=hardware)
        self._rules = RulesPolicy("rules", RULES, self._eligibility.modes, settings, profile)
        self._predictor = predictor
        self._settings_version = settings.version
        self._version = predictor.version

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Outcome:
        eligible, refused = self._eligibility.split(features, snapshot)
        if not eligible:
            return refusal(self.name, self._settings_version, features, refused)
        scores = dict(zip(self._predictor.modes, self._predictor.scores(feature_vector(features)), strict=True))
        # A score that is not a number compares false with everything: such a mode is not chosen.
        known = [(scores[mode.name], mode) for mode in eligible if scores.get(mode.name, _NAN) < _INFINITE]
        if not known:
            outcome = self._rules.decide(features, snapshot)
            if isinstance(outcome, Decision):
                return msgspec.structs.replace(outcome, stands_in_for=self.name)
            return outcome
        known.sort(key=lambda scored: scored[0])
        score, mode = known[0]
        runner_up = known[1] if len(known) > 1 else None
        return Decision(
            mode=mode.name,
            engine=mode.engine,
            request_class=features.request_class,
            policy=self.name,
            settings_version=self._settings_version,
            profile_version=self._version,
            rule=f"lowest score of {self._version} ({score:.4g})",
            runner_up=None if runner_up is None else runner_up[1].name,
            lost_by=None if runner_up is None else LostBy.SCORE,
        )


_NAN = float("nan")
_INFINITE = float("inf")
