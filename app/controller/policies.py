"""The policies that decide, made from live settings and files, and what of it a change leaves standing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from app.config import LiveSettings
from app.controller.knowledge import Knowledge
from app.energy.rows import Context
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies import Policy, make_policy
from app.routing.policies.cost import CostPolicy
from app.routing.policies.prediction import Prediction
from app.routing.policies.static import StaticPolicy
from app.routing.snapshot import Snapshot

log = logging.getLogger("ray.serve")


class UnknownPolicy(ValueError):
    """There is no such policy here; the message says which there are, or what it lacks."""


class PolicySet:
    """All policies for one state of settings and files. Immutable but for policies that are made when asked for."""

    def __init__(self, live: LiveSettings, modes: Sequence[ModeInfo], knowledge: Knowledge) -> None:
        """
        Raises:
            UnknownPolicy: the policy or a shadow does not exist, or lacks what it needs.
        """
        self.live = live
        self.knowledge = knowledge
        self._modes = tuple(modes)
        self._made: dict[str, Policy] = {}
        self._named: dict[str, Policy] = {
            mode.name: StaticPolicy(mode.name, self._modes, live.routing, fall_back=False) for mode in self._modes
        }
        self.main = self.policy(live.policy)
        self.shadows = tuple(self.policy(name) for name in live.shadows)
        self.context = self._context()

    def policy(self, name: str) -> Policy:
        """The policy called `name`.

        Raises:
            UnknownPolicy
        """
        if (policy := self._made.get(name)) is None:
            try:
                policy = make_policy(
                    name,
                    self._modes,
                    self.live.routing,
                    self.knowledge.profile,
                    self.knowledge.predictor,
                    model=self.knowledge.model,
                    hardware=self.knowledge.hardware,
                )
            except ValueError as error:
                raise UnknownPolicy(str(error)) from None
            self._made[name] = policy
        return policy

    def predict(self, mode: str, features: RequestFeatures, snapshot: Snapshot) -> Prediction | None:
        """What the profile says of a mode, whoever chose it; None without a profile of it."""
        if self.knowledge.profile is None:
            return None
        cost = self.policy("cost")
        assert isinstance(cost, CostPolicy)
        return cost.prediction(mode, features, snapshot)

    def named(self, mode: str) -> Policy:
        """The policy of a request that names its mode: that one or none."""
        return self._named[mode]

    def _context(self) -> Context:
        """All that is needed to decide again as these policies do (a trained model aside, which is a file)."""
        profile, predictor = self.knowledge.profile, self.knowledge.predictor
        content = json.dumps(
            {
                "model": self.knowledge.model,
                "hardware": self.knowledge.hardware,
                "settings": self.live.routing.model_dump(mode="json"),
                "modes": [asdict(mode) for mode in self._modes],
                "profile": None if profile is None else profile.model_dump(mode="json"),
                "trained_model": None if predictor is None else predictor.version,
            },
            sort_keys=True,
        )
        return Context(hashlib.blake2b(content.encode(), digest_size=8).hexdigest(), content)
