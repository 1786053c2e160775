"""Decides for each request, and learns from what came of it. The only owner of what routing learns online."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.config import LiveSettings
from app.controller.knowledge import Knowledge
from app.controller.links import EngineLink
from app.controller.live_state import take_snapshot
from app.controller.past import PastRequest
from app.controller.plan import Plan, Ticket
from app.controller.policies import PolicySet
from app.controller.prompts import Prompt
from app.routing.acceptance import AcceptanceLearner
from app.routing.breaker import Breakers, BreakerState
from app.routing.classes import prompt_shape
from app.routing.conversations import Conversations
from app.routing.corrections import Corrections
from app.routing.decision import Decision
from app.routing.features import RequestFeatures, Wishes, measure
from app.routing.mode_info import ModeInfo
from app.routing.output_length import OutputLengthPredictor
from app.routing.prefix_index import PrefixIndex
from app.routing.shadow import evaluate
from app.routing.snapshot import Snapshot
from app.routing.tags import tag_of
from app.routing.traffic import Traffic
from app.wire import Usage

log = logging.getLogger("ray.serve")
_QUIET_UP_TO = 2
"""Requests on the device up to which a latency says something of the profile, and not of who joined meanwhile."""


def mode_infos(links: Sequence[EngineLink]) -> tuple[ModeInfo, ...]:
    """All served modes as routing knows them."""
    return tuple(
        ModeInfo(
            mode.name,
            link.name,
            link.spec.weights,
            mode.lossless,
            prefix_reuse=mode.prefix_reuse,
            speculative=link.spec.draft_model or "speculative_config" in link.spec.delta,
        )
        for link in links
        for mode in link.spec.modes
    )


class Router:
    """Features, snapshot, decision; then prefixes, output lengths, corrections, acceptance and breakers."""

    def __init__(self, links: Sequence[EngineLink], live: LiveSettings, knowledge: Knowledge) -> None:
        """
        Raises:
            UnknownPolicy: see `PolicySet`.
        """
        self.modes = mode_infos(links)
        self.policies = PolicySet(live, self.modes, knowledge)
        self.device_bytes: tuple[int | None, int | None] = (None, None)
        """Total and free memory of the device, as read last."""
        self._links = tuple(links)
        self._by_name = {mode.name: mode for mode in self.modes}
        self._breakers = Breakers(self._by_name)
        self._prefixes = PrefixIndex()
        self._lengths = OutputLengthPredictor()
        self._corrections = Corrections()
        self._acceptance = AcceptanceLearner()
        self._conversations = Conversations()
        self._traffic = Traffic()

    def change(self, live: LiveSettings | None = None, knowledge: Knowledge | None = None) -> None:
        """Other settings or files from now on; what was learned stays.

        Raises:
            UnknownPolicy: nothing was changed.
        """
        now = self.policies
        self.policies = PolicySet(live or now.live, self.modes, knowledge or now.knowledge)

    @property
    def live(self) -> LiveSettings:
        return self.policies.live

    # Deciding ---------------------------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> Snapshot:
        """The engines, the device and what was learned, at this moment."""
        return take_snapshot(
            self._links,
            now_s,
            self.live.queue_limit,
            tripped_modes=self._breakers.tripped(now_s),
            device=self.device_bytes,
            corrections=self._corrections.factors,
            accepted_per_step=self._acceptance.per_step,
            traffic=self._traffic,
        )

    def expected_output_tokens(self, prompt: Prompt, max_tokens: int | None, label: str | None) -> int:
        """What a request will probably produce in all: for a reservation, before it is decided where it goes."""
        tag = tag_of(prompt.instruction, label).tag
        return prompt.sequences * self._lengths.predict(tag, prompt_shape(prompt.tokens), max_tokens).tokens

    def decide(
        self,
        prompt: Prompt,
        *,
        mode: str | None = None,
        policy: str | None = None,
        max_tokens: int | None = None,
        label: str | None = None,
        wishes: Wishes,
    ) -> Plan:
        """Choose for a request; nothing is changed by it but the prefix index's view of engines.

        `mode` is one that the request names; `policy` another policy than the configured one.

        Raises:
            UnknownPolicy
        """
        began = time.perf_counter()
        now_s = time.monotonic()
        snapshot = self.snapshot(now_s)
        for name, view in snapshot.engines.items():
            self._prefixes.follow(name, view.epoch, view.kv_capacity_tokens)
        said = prompt.said
        if said is not None and said.before is not None:
            # Many begin alike; only where its history was shortened is a conversation recognised by its beginning.
            weights = self._conversations.weights(said.before) or self._conversations.weights(said.began)
            wishes = msgspec.structs.replace(wishes, conversation=said.began, conversation_weights=weights)
        features = self._measure(prompt, max_tokens, label, wishes, snapshot)
        policies = self.policies
        if mode is not None:
            chosen = policies.named(mode)
        else:
            chosen = policies.main if policy is None else policies.policy(policy)
        outcome = chosen.decide(features, snapshot)
        took_us = (time.perf_counter() - began) * 1e6
        shadows = evaluate(policies.shadows, outcome, features, snapshot) if policies.shadows else ()
        return Plan(features, snapshot, outcome, chosen.name, mode is not None, policies.context, shadows, took_us)

    def _measure(
        self, prompt: Prompt, max_tokens: int | None, label: str | None, wishes: Wishes, snapshot: Snapshot
    ) -> RequestFeatures:
        return measure(
            text=prompt.instruction,
            prompt_tokens=prompt.tokens,
            prompt_exact=prompt.exact,
            snapshot=snapshot,
            predictor=self._lengths,
            settings=self.live.routing,
            sequences=prompt.sequences,
            max_tokens=max_tokens,
            label=label,
            seen_tokens=self._prefixes.seen_tokens(prompt.chain, prompt.tokens),
            cached_tokens=self._prefixes.cached_tokens(prompt.chain, prompt.tokens),
            draw=random.random(),
            wishes=wishes,
        )

    # Learning ---------------------------------------------------------------------------------------------------

    def sent(self, prompt: Prompt, features: RequestFeatures, decision: Decision, now_s: float) -> None:
        """The request goes to the engine."""
        mode = self._by_name[decision.mode]
        self._breakers[mode.name].started(now_s)
        size = features.prompt_tokens, features.seen_tokens, features.expected_output_tokens
        self._traffic.add(*size, features.tag, now_s)
        self._prefixes.record(prompt.chain, prompt.tokens, mode.engine if mode.prefix_reuse else None)
        if prompt.said is not None:
            for name in {prompt.said.began, prompt.said.so_far}:
                self._conversations.began(name, mode.weights)

    def failed(self, mode: str) -> None:
        """A request that was sent to this mode lost its engine, or failed there and succeeded elsewhere."""
        self._breakers[mode].failed(time.monotonic())

    def ended(self, mode: str, sent_s: float | None) -> None:
        """What was sent at `sent_s` has ended, in a way that says nothing of the mode: given up, late or at fault."""
        self._breakers[mode].released(sent_s)

    def succeeded(self, ticket: Ticket, usage: Usage | None) -> float | None:
        """A request was answered to its end; returns observed/predicted latency where that can be told."""
        plan = ticket.plan
        assert plan is not None
        assert isinstance(plan.outcome, Decision)
        decision, features = plan.outcome, plan.features
        self._breakers[decision.mode].succeeded()
        if usage is None or not usage.output_tokens:
            return None
        now_s = time.monotonic()
        each_tokens = round(usage.output_tokens / features.sequences)
        self._lengths.observe(features.tag, features.prompt_shape, features.max_tokens, each_tokens, now_s)
        if self._by_name[decision.mode].speculative:
            self._acceptance.observe(decision.mode, features.tag, usage.output_tokens, usage.accepted_tokens)
        return self._correct(ticket, plan, decision, usage, now_s)

    def remember(self, past: Sequence[PastRequest], now_s: float) -> int:
        """Learn again from requests before this router began, oldest first; returns how many count.

        Those of modes that are not deployed do not. What is known of a conversation since stays. Only conversations,
        output lengths and acceptance are learned again: hashes of the prefix index are of one process and nowhere
        written down, and corrections, breakers and traffic are of engines and minutes that may be gone.
        """
        counting = [request for request in past if request.mode in self._by_name]
        weights: dict[str, str] = {}
        for request in counting:
            mode, tag = self._by_name[request.mode], request.tag
            for name in request.conversation:
                weights.pop(name, None)
                weights[name] = mode.weights
            if request.output_tokens:
                each_tokens, then_s = round(request.output_tokens / request.sequences), now_s - request.age_s
                self._lengths.observe(tag, request.prompt_shape, request.max_tokens, each_tokens, then_s)
                if mode.speculative:
                    self._acceptance.observe(mode.name, tag, request.output_tokens, request.accepted_tokens)
        for name, began_with in weights.items():
            if self._conversations.weights(name) is None:
                self._conversations.began(name, began_with)
        return len(counting)

    def _correct(self, ticket: Ticket, plan: Plan, decision: Decision, usage: Usage, now_s: float) -> float | None:
        """Compare what the engine took with what the profile says of the tokens that were really produced.

        Policies other than `cost` predict nothing when they decide, so it is made up for here.
        """
        if usage.queued_ms is None or usage.last_token_ms is None:
            return None
        features = plan.features
        terms = decision.terms or self.policies.predict(decision.mode, features, plan.snapshot)
        if terms is None:
            return None
        steps_expected = max(1, features.expected_output_tokens - 1)
        steps = max(0.0, usage.output_tokens / features.sequences - 1)
        decode_ms = terms.decode_ms * steps / steps_expected
        own_ms = terms.prefill_ms + terms.decode_ms
        slowdown = terms.interference_ms / own_ms if own_ms else 0.0
        predicted_ms = (terms.prefill_ms + decode_ms) * (1.0 + slowdown)
        observed_ms = usage.last_token_ms - usage.queued_ms
        now_there = sum(len(link.in_flight) for link in self._links)
        if ticket.in_flight_then <= _QUIET_UP_TO and now_there <= _QUIET_UP_TO:
            self._corrections.observe(
                decision.engine, features.tag, observed_ms, predicted_ms / terms.correction, now_s
            )
        return observed_ms / predicted_ms if predicted_ms > 0 else None

    def forget_prefixes(self) -> None:
        """The engines' caches were reset."""
        for link in self._links:
            self._prefixes.forget(link.name)

    # Telling ----------------------------------------------------------------------------------------------------

    def breaker(self, mode: str) -> tuple[BreakerState, float | None]:
        """A mode's circuit breaker, and the seconds until it is tried again."""
        now_s = time.monotonic()
        return self._breakers[mode].state(now_s), self._breakers[mode].retry_in_s(now_s)

    def breaker_pauses_s(self) -> dict[str, float]:
        """Seconds until it is tried again, by mode whose circuit breaker is open."""
        return self._breakers.pauses_s(time.monotonic())

    def describe(self) -> dict[str, Any]:
        """What decides at the moment, as JSON."""
        live, knowledge = self.live, self.policies.knowledge
        return {
            "policy": live.policy,
            "shadows": list(live.shadows),
            "settings_version": live.routing.version,
            "settings": live.routing.model_dump(mode="json"),
            "context": self.policies.context.name,
            "profile": None if knowledge.profile is None else knowledge.profile.version,
            "trained_model": None if knowledge.predictor is None else knowledge.predictor.version,
            "refused": list(knowledge.refused),
            "corrections": _rounded(self._corrections.factors),
            "accepted_per_step": _rounded(self._acceptance.per_step),
        }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(figure, 4) for name, figure in figures.items()}
