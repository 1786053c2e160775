"""One mode for every request: `static:<mode>`, or a mode that the request itself names."""

from __future__ import annotations

from collections.abc import Iterable

from app.routing.decision import Decision, Ineligible, Outcome
from app.routing.eligibility import Eligibility, refusal
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot


class StaticPolicy:
    """Always `mode`. Whoever names a mode accepts its quality; `quality: exact` still refuses a lossy one.

    With `fall_back` (an operator's choice) the reference mode serves while the mode cannot; without (a request's own
    choice) the request is refused then.

    Raises:
        ValueError: the mode is not deployed; the message names those that are.
    """

    __slots__ = ("_candidates", "_eligibility", "_settings_version", "name")

    def __init__(
        self, mode: str, modes: Iterable[ModeInfo], settings: RoutingSettings, *, fall_back: bool = True
    ) -> None:
        self._eligibility = Eligibility(modes, settings, None)
        deployed = {info.name: info for info in self._eligibility.modes}
        if mode not in deployed:
            raise ValueError(f"Mode {mode!r} is not deployed; there are {', '.join(sorted(deployed))}.")
        self.name = f"static:{mode}"
        self._settings_version = settings.version
        wanted = (mode, settings.reference_mode) if fall_back else (mode,)
        self._candidates = tuple(deployed[name] for name in dict.fromkeys(wanted) if name in deployed)

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Outcome:
        refused: dict[str, Ineligible] = {}
        for mode in self._candidates:
            why = self._eligibility.refuses(mode, features, snapshot, gated=False)
            if why is None:
                return Decision(
                    mode=mode.name,
                    engine=mode.engine,
                    request_class=features.request_class,
                    policy=self.name,
                    settings_version=self._settings_version,
                    rule="the mode that was named"
                    if not refused
                    else "the reference, while the named mode cannot serve",
                )
            refused[mode.name] = why
        return refusal(self.name, self._settings_version, features, refused)
