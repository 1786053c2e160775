"""Which modes may serve a request at all. Policies choose among these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.routing.decision import Ineligible, Refusal
from app.routing.features import Quality, RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.profile import GateOutcome, Profile, QualityEvidence
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Residency, Snapshot

ANY_SCOPE = "any"
_AVAILABLE = frozenset({Residency.RESIDENT, Residency.ASLEEP, Residency.WAKING})


class QualityGate:
    """Lossy modes pass by measured evidence or by the operator's word, lossless ones until they measurably fail.

    Evidence is looked up from the most specific scope to the least: the client's label, the tag, the class, `any`.
    A lossless reference mode passes always: it is what others are measured against.
    """

    __slots__ = ("_accepted", "_judged", "_outcomes", "_refused", "_scopes")

    def __init__(
        self, modes: Iterable[ModeInfo], evidence: Iterable[QualityEvidence], settings: RoutingSettings
    ) -> None:
        self._judged = tuple(mode for mode in modes if not (mode.lossless and mode.name == settings.reference_mode))
        self._accepted = settings.accepted_modes
        self._outcomes: dict[tuple[str, str], GateOutcome] = {}
        for piece in evidence:
            key = (piece.mode, piece.scope)
            # Several pieces of evidence for one scope (accuracy, ROUGE-L): all must pass, and one that fails decides.
            if piece.outcome is GateOutcome.FAIL or self._outcomes.get(key, GateOutcome.PASS) is GateOutcome.PASS:
                self._outcomes[key] = piece.outcome
        self._scopes = frozenset(scope for _, scope in self._outcomes)
        # One entry per scope a request can be in; labels without evidence share one, so that clients cannot grow it.
        self._refused: dict[tuple[str | None, str, str, str], Mapping[str, Ineligible]] = {}

    def refused(self, features: RequestFeatures) -> Mapping[str, Ineligible]:
        """The modes that the gate keeps from this request, each with the reason."""
        label = features.label if features.label in self._scopes else None
        key = (label, features.tag, features.request_class, features.wishes.quality)
        refused = self._refused.get(key)
        if refused is None:
            refused = self._refused[key] = self._judge(label, features)
        return refused

    def _judge(self, label: str | None, features: RequestFeatures) -> dict[str, Ineligible]:
        exact = features.wishes.quality is Quality.EXACT
        scopes = [scope for scope in (label, features.tag, features.request_class, ANY_SCOPE) if scope is not None]
        refused = {}
        for mode in self._judged:
            outcomes = [self._outcomes[mode.name, scope] for scope in scopes if (mode.name, scope) in self._outcomes]
            if mode.lossless:
                # What decided nothing says nothing against it, and leaves the word to a wider scope.
                outcomes = [outcome for outcome in outcomes if outcome in (GateOutcome.PASS, GateOutcome.FAIL)]
            if exact and not mode.lossless:
                refused[mode.name] = Ineligible.NOT_LOSSLESS
            elif mode.name in self._accepted and not exact:
                continue  # whoever asks for an exact answer has accepted no loss
            elif outcomes and outcomes[0] is GateOutcome.FAIL:
                refused[mode.name] = Ineligible.QUALITY_FAILED
            elif not mode.lossless and (not outcomes or outcomes[0] is not GateOutcome.PASS):
                refused[mode.name] = Ineligible.QUALITY_UNPROVEN
        return refused


class Eligibility:
    """The gate in front of every policy: health, residency, breaker, quality, memory, stickiness, queue."""

    __slots__ = ("_by_engine", "_gate", "_too_large", "modes")

    def __init__(self, modes: Iterable[ModeInfo], settings: RoutingSettings, profile: Profile | None) -> None:
        self.modes: Sequence[ModeInfo] = tuple(modes)
        self._gate = QualityGate(self.modes, profile.quality if profile is not None else (), settings)
        grouped: dict[str, list[ModeInfo]] = {}
        for mode in self.modes:
            grouped.setdefault(mode.engine, []).append(mode)
        self._by_engine = tuple((engine, tuple(carried)) for engine, carried in grouped.items())
        self._too_large = _too_large(settings, profile)

    def refuses(
        self, mode: ModeInfo, features: RequestFeatures, snapshot: Snapshot, *, gated: bool = True
    ) -> Ineligible | None:
        """Why `mode` may not serve this request; None if it may.

        A full queue comes last: a mode refused for it could serve the request later. `gated=False` is for a mode
        that somebody named: evidence about its quality, its memory and the conversation's weights do not matter then.
        """
        why = _engine_refuses(mode.engine, features, snapshot)
        if why is not None:
            return why
        if mode.name in snapshot.tripped_modes:
            return Ineligible.BREAKER_OPEN
        if gated:
            gate = self._gate.refused(features)
            why = self._mode_refuses(mode, gate, self._weights_kept(features, snapshot))
        elif features.wishes.quality is Quality.EXACT and not mode.lossless:
            why = Ineligible.NOT_LOSSLESS
        if why is not None:
            return why
        return _queue_refuses(mode.engine, features, snapshot)

    def split(self, features: RequestFeatures, snapshot: Snapshot) -> tuple[list[ModeInfo], dict[str, Ineligible]]:
        """Modes that may serve, and the reason of each that may not: `refuses` for all, each engine looked at once."""
        eligible: list[ModeInfo] = []
        refused: dict[str, Ineligible] = {}
        gate = self._gate.refused(features)
        weights = self._weights_kept(features, snapshot)
        crowded = features.wishes.crowded_engines
        simple = not gate and weights is None and not self._too_large and not snapshot.tripped_modes
        for engine, modes in self._by_engine:
            why = _engine_refuses(engine, features, snapshot)
            if why is None:
                view = snapshot.engines[engine]
                free = view.in_flight < view.queue_limit and engine not in crowded
                if simple and free:
                    eligible.extend(modes)
                    continue
            for mode in modes:
                reason = why
                if reason is None:
                    if mode.name in snapshot.tripped_modes:
                        reason = Ineligible.BREAKER_OPEN
                    else:
                        reason = self._mode_refuses(mode, gate, weights)
                        if reason is None and not free:
                            reason = _queue_refuses(engine, features, snapshot)
                if reason is None:
                    eligible.append(mode)
                else:
                    refused[mode.name] = reason
        return eligible, refused

    def _mode_refuses(self, mode: ModeInfo, gate: Mapping[str, Ineligible], weights: str | None) -> Ineligible | None:
        why = gate.get(mode.name)
        if why is not None:
            return why
        if mode.name in self._too_large:
            return Ineligible.MEMORY
        return Ineligible.OTHER_WEIGHTS if weights is not None and mode.weights != weights else None

    def _weights_kept(self, features: RequestFeatures, snapshot: Snapshot) -> str | None:
        """The weights the conversation must keep: those it began with, while a mode with them can serve."""
        weights = features.wishes.conversation_weights
        if weights is None:
            return None
        gate = self._gate.refused(features)
        for mode in self.modes:
            if (
                mode.weights == weights
                and mode.name not in gate
                and mode.name not in snapshot.tripped_modes
                and mode.name not in self._too_large
                and _engine_refuses(mode.engine, features, snapshot) is None
            ):
                return weights
        return None


def _engine_refuses(engine: str, features: RequestFeatures, snapshot: Snapshot) -> Ineligible | None:
    if engine in features.wishes.excluded_engines:
        return Ineligible.EXCLUDED
    view = snapshot.engines.get(engine)
    if view is None or not view.healthy:
        return Ineligible.UNHEALTHY
    return None if view.residency in _AVAILABLE else Ineligible.NOT_RESIDENT


def _queue_refuses(engine: str, features: RequestFeatures, snapshot: Snapshot) -> Ineligible | None:
    """For an engine that `_engine_refuses` lets pass."""
    view = snapshot.engines[engine]
    if view.in_flight >= view.queue_limit:
        return Ineligible.QUEUE_FULL
    return Ineligible.TENANT_QUEUE_FULL if engine in features.wishes.crowded_engines else None


def _too_large(settings: RoutingSettings, profile: Profile | None) -> frozenset[str]:
    if profile is None or settings.max_memory_ratio is None:
        return frozenset()
    reference = profile.modes.get(settings.reference_mode)
    if reference is None or reference.peak_memory_bytes is None:
        return frozenset()
    most = reference.peak_memory_bytes * settings.max_memory_ratio
    return frozenset(
        name
        for name, mode in profile.modes.items()
        if mode.peak_memory_bytes is not None and mode.peak_memory_bytes > most
    )


_SEVERITY = {
    code: place
    for place, code in enumerate(
        (
            # The first that some mode has is the code of the whole refusal: what waiting would cure, then what
            # asking otherwise would.
            Ineligible.QUEUE_FULL,
            Ineligible.TENANT_QUEUE_FULL,
            Ineligible.BREAKER_OPEN,
            Ineligible.NOT_RESIDENT,
            Ineligible.UNHEALTHY,
            Ineligible.EXCLUDED,
            Ineligible.NOT_LOSSLESS,
            Ineligible.QUALITY_FAILED,
            Ineligible.QUALITY_UNPROVEN,
            Ineligible.ENERGY,
            Ineligible.MEMORY,
            Ineligible.UNPROFILED,
            Ineligible.OTHER_WEIGHTS,
            Ineligible.UNKNOWN_MODE,
        )
    )
}


def refusal_code(by_mode: Iterable[Ineligible]) -> Ineligible:
    """The one code that stands for all modes'; `UNKNOWN_MODE` for none."""
    return min(by_mode, key=_SEVERITY.__getitem__, default=Ineligible.UNKNOWN_MODE)


def refusal(
    policy: str, settings_version: str, features: RequestFeatures, by_mode: Mapping[str, Ineligible]
) -> Refusal:
    """What a policy answers when no mode may serve."""
    return Refusal(
        code=refusal_code(by_mode.values()),
        request_class=features.request_class,
        policy=policy,
        settings_version=settings_version,
        by_mode=by_mode,
    )
