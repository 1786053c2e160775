"""The one contract of all policies."""

from __future__ import annotations

from typing import Protocol

from app.routing.decision import Outcome
from app.routing.features import RequestFeatures
from app.routing.snapshot import Snapshot


class Policy(Protocol):
    """Chooses a mode for a request. Pure: equal arguments, equal outcome; nothing is changed, nothing is read."""

    @property
    def name(self) -> str:
        """As in the configuration, the log and the metrics."""

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Outcome:
        """The decision, or a refusal with the reason of each mode."""
