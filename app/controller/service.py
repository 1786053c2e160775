"""What the controller does with a request, free of Ray: read, admit, decide, call an engine, pass the answer on."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.config import LiveSettings, Settings
from app.controller.body import Incoming
from app.controller.choice import Choice, ModeTable
from app.controller.errors import ApiError, invalid
from app.controller.knowledge import Knowledge
from app.controller.links import Ended, EngineLink, EngineLost
from app.controller.plan import Plan, Ticket
from app.controller.policies import UnknownPolicy
from app.controller.prompts import PromptReader, Tokenizes
from app.controller.router import Router
from app.controller.settlement import Settlement, TakesRecords
from app.controller.tenants import Tenants
from app.controller.wishes import Asked, max_tokens_of, read_asked
from app.openai_errors import ENGINE_ERROR, ENGINE_LOST
from app.routing.admission import retry_after_s
from app.routing.decision import Decision, Refusal
from app.routing.features import Objective
from app.routing.queue_share import has_its_share
from app.telemetry import Telemetry
from app.wire import Call, Endpoint, Reply, Started

log = logging.getLogger("ray.serve")
_COMES_BACK_S = 5
"""To a client whose request was lost with every engine that could serve it."""
_ENDED = {ENGINE_LOST: "failed", "deadline_exceeded": "deadline"}
"""How a request ended by the code of its error; `refused` where it was never begun."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send: headers, and a whole reply or the frames of a stream."""

    headers: dict[str, str]
    reply: Reply | None = None
    frames: AsyncIterator[str] | None = None


class Service:
    """Serves requests; one per controller process."""

    def __init__(
        self,
        settings: Settings,
        links: Sequence[EngineLink],
        tokenizer: Tokenizes | None,
        tenants: Tenants,
        records: TakesRecords,
        telemetry: Telemetry,
        knowledge: Knowledge,
    ) -> None:
        """
        Raises:
            UnknownPolicy: the configuration names a policy that does not exist here.
        """
        self.settings = settings
        self.links = tuple(links)
        self.table = ModeTable(settings.model.served_name, self.links, [mode.name for mode in settings.resolved_modes])
        self.router = Router(self.links, settings.live, knowledge)
        self.tenants = tenants
        self.settings_error: str | None = None
        """Why the last change of live settings was not taken."""
        self._prompts = PromptReader(tokenizer, settings.controller.exact_below_chars, settings.model.max_model_len)
        self._records = records
        self._telemetry = telemetry
        self._settlement = Settlement(self.router, self._prompts, tenants, records, telemetry)
        self._engine_of = {name: choice.link.name for name, choice in self.table.modes.items()}

    def count_with(self, tokenizer: Tokenizes) -> None:
        """The model's tokenizer is there."""
        self._prompts.tokenizer = tokenizer

    # Settings ---------------------------------------------------------------------------------------------------

    def change(self, live: LiveSettings | None = None, knowledge: Knowledge | None = None) -> None:
        """Take other live settings or files. Settings that cannot be taken change nothing, and it is told why."""
        try:
            self.router.change(live, knowledge)
        except UnknownPolicy as error:
            self.refuse_settings(str(error))
            return
        if live is not None:
            self.tenants.limit(live.tenants, time.monotonic())
            self.settings_error = None

    def refuse_settings(self, why: str) -> None:
        """Live settings that are not valid: the present ones stay."""
        log.error("live settings were not taken: %s", why)
        self.settings_error = why

    # Requests ---------------------------------------------------------------------------------------------------

    def refused(self, error: ApiError) -> None:
        """Count a refusal, whatever part of the HTTP surface it came from."""
        self._telemetry.count("modeswitch_refusals_total", error.code or "invalid_request")

    async def answer(self, incoming: Incoming) -> Answer:
        """Serve one request.

        Raises:
            ApiError: the request is refused, or no engine could answer.
        """
        headers = incoming.headers
        tenant = self.tenants.who(headers.get("authorization", ""), headers.get("x-modeswitch-tenant", ""))
        key = f"{incoming.request_id}.{uuid.uuid4().hex[:8]}" if incoming.named else incoming.request_id
        ticket = Ticket(key, incoming, tenant, time.monotonic())
        try:
            return await self._answer(ticket)
        except ApiError as error:
            self._settlement.give_up(ticket, _ENDED.get(error.code or "", "refused"), error.code)
            error.headers = {**ticket.headers(), **error.headers}
            raise
        except asyncio.CancelledError:
            self._settlement.give_up(ticket, "aborted")
            raise
        except Exception:
            self._settlement.give_up(ticket, "failed", "internal_error")
            raise

    async def _answer(self, ticket: Ticket) -> Answer:
        incoming = ticket.incoming
        mode = self.table.named(incoming.model)
        otherwise = Objective(self.router.live.routing.objective)
        asked = read_asked(incoming.headers, incoming.body.get("metadata"), otherwise)
        if asked.policy is not None and not self.settings.controller.policy_header:
            asked = Asked(asked.wishes, None, asked.label, asked.deadline_s)
        deadline_s = self._deadline_s(ticket, asked)
        try:
            async with asyncio.timeout_at(deadline_s):
                ticket.prompt = await self._prompts.read(incoming.endpoint, incoming.body)
                self._refuse_overlong(ticket)
                max_tokens = max_tokens_of(incoming.endpoint, incoming.body)
                expected_tokens = self.router.expected_output_tokens(ticket.prompt, max_tokens, asked.label)
                ticket.admission = self.tenants.admit(
                    ticket.tenant, ticket.prompt.tokens, expected_tokens, ticket.arrived_s
                )
                return await self._dispatch(ticket, mode, asked, max_tokens, deadline_s)
        except TimeoutError:
            raise ApiError(504, "the deadline of this request has passed", code="deadline_exceeded") from None

    async def _dispatch(
        self, ticket: Ticket, mode: str | None, asked: Asked, max_tokens: int | None, deadline_s: float | None
    ) -> Answer:
        """Decide and send; when that fails before the first token, decide again without the engine.

        A lost engine says nothing of the request, so every other one may be tried. A request that failed in an engine
        which is alive may be at fault itself: it is tried once more, and at last in the reference mode if that is left.
        The modes it failed in are blamed once another one answers.
        """
        assert ticket.prompt is not None
        lost: EngineLost | None = None
        failed: Reply | None = None
        suspects: list[str] = []
        last_try: str | None = None
        while True:
            plan = self._plan(ticket, mode, asked, max_tokens, last_try)
            if not isinstance(plan.outcome, Decision):
                if failed is not None:
                    return self._whole(ticket, failed)
                ticket.plan, ticket.link = plan, None
                log.info("request %s: policy %s: %s", ticket.key, plan.policy, plan.outcome.reason)
                raise self._refusal(plan.outcome, plan, mode, lost)
            choice = self.table.modes[plan.outcome.mode]
            ticket.plan, ticket.link = plan, choice.link
            self._sent(ticket, plan, plan.outcome)
            call = self._call(ticket, plan, choice)
            try:
                answer = await choice.link.start(call, plan.features.expected_output_tokens, ticket.prompt.tokens)
            except EngineLost as error:
                log.warning("request %s: engine %s: %s", ticket.key, choice.link.name, error)
                self.router.failed(choice.mode.name)
                self._leave(ticket, choice.link)
                ticket.link = None
                lost = error
                continue
            if isinstance(answer, Started) or answer.status < 400:
                for name in suspects:
                    self.router.failed(name)
            if isinstance(answer, Started):
                return Answer(ticket.headers(), frames=choice.link.rest(call, answer, self._closes(ticket), deadline_s))
            if answer.status >= 500 and failed is not None:
                last_try = self._last_resort([*ticket.lost_engines, choice.link.name])
            if answer.status >= 500 and (failed is None or last_try is not None):
                log.warning("request %s failed in engine %s", ticket.key, choice.link.name)
                self.router.ended(choice.mode.name, ticket.dispatched_s)
                self._leave(ticket, choice.link)
                failed = answer
                suspects.append(choice.mode.name)
                continue
            return self._whole(ticket, answer)

    def _leave(self, ticket: Ticket, link: EngineLink) -> None:
        self._telemetry.count("modeswitch_reroutes_total", link.name)
        ticket.lost_engines.append(link.name)

    def _whole(self, ticket: Ticket, reply: Reply) -> Answer:
        failed = reply.status >= 500
        status = "ok" if reply.status < 400 else "failed" if failed else "refused"
        self._settlement.close(ticket, status, reply.usage, ENGINE_ERROR if failed else None)
        return Answer(ticket.headers(), reply=reply)

    def _closes(self, ticket: Ticket) -> Ended:
        return lambda usage, status, code: self._settlement.close(ticket, status, usage, code)

    def _last_resort(self, tried: Sequence[str]) -> str | None:
        """The policy that knows the reference mode only; None where that is not served, or its engine was tried."""
        reference = self.router.live.routing.reference_mode
        return None if self._engine_of.get(reference) in (None, *tried) else f"static:{reference}"

    def _plan(
        self, ticket: Ticket, mode: str | None, asked: Asked, max_tokens: int | None, last_try: str | None
    ) -> Plan:
        """Decide by the policy `last_try`, or else by the one that is asked for and, if need be, by the last resort."""
        assert ticket.prompt is not None
        wishes, crowded = asked.wishes, self._crowded_engines(ticket.tenant)
        if ticket.lost_engines or crowded:
            wishes = msgspec.structs.replace(
                wishes, excluded_engines=tuple(ticket.lost_engines), crowded_engines=crowded
            )
        decide, prompt = self.router.decide, ticket.prompt
        policy = last_try or asked.policy
        try:
            plan = decide(prompt, mode=mode, policy=policy, max_tokens=max_tokens, label=asked.label, wishes=wishes)
            if ticket.lost_engines and mode is None and last_try is None and isinstance(plan.outcome, Refusal):
                # Whatever the policy says of it: better the reference than no answer, and any other if that was lost.
                last = self._last_resort(ticket.lost_engines) or "rules"
                plan = decide(prompt, policy=last, max_tokens=max_tokens, label=asked.label, wishes=wishes)
        except UnknownPolicy as error:
            raise invalid(str(error), "metadata.policy", "unknown_policy") from None
        self._telemetry.observe("modeswitch_decision_us", plan.took_us, plan.policy)
        return plan

    def _crowded_engines(self, tenant: str) -> tuple[str, ...]:
        """Engines in whose queue the tenant has its share of places; none while there is one tenant only."""
        if not self.tenants.several:
            return ()
        share, limit = self.tenants.share(tenant), self.router.live.queue_limit
        return tuple(
            link.name
            for link in self.links
            if has_its_share(link.in_flight.held_by(tenant), limit - len(link.in_flight), share)
        )

    def _sent(self, ticket: Ticket, plan: Plan, decision: Decision) -> None:
        assert ticket.prompt is not None
        ticket.dispatched_s = time.monotonic()
        ticket.in_flight_then = 1 + sum(len(link.in_flight) for link in self.links)
        self.router.sent(ticket.prompt, plan.features, decision, ticket.dispatched_s)
        self._telemetry.count(
            "modeswitch_decisions_total", decision.mode, decision.request_class.value, plan.policy, _why(plan, decision)
        )
        log.info(
            "request %s: policy %s, profile %s, engine %s: %s",
            ticket.key,
            plan.policy,
            decision.profile_version,
            decision.engine,
            decision.reason,
        )

    def _call(self, ticket: Ticket, plan: Plan, choice: Choice) -> Call:
        incoming, link = ticket.incoming, choice.link
        body: dict[str, Any] = {
            **incoming.body,
            "model": self.table.served_name,
            "request_id": incoming.request_id,
        }
        if link.spec.prefix_caching and not choice.mode.prefix_reuse:
            # The engine caches prefixes for another mode it carries; a salt of its own keeps this request from reuse.
            body["cache_salt"] = uuid.uuid4().hex
        body.pop("priority", None)
        if ticket.admission is not None and link.takes_priorities:
            # Tenants' shares decide it, or a client could step in front of all others.
            body["priority"] = ticket.admission.priority
        return Call(
            key=ticket.key,
            request_id=incoming.request_id,
            endpoint=incoming.endpoint,
            mode=choice.mode.name,
            body=body,
            include=incoming.include,
            stream=incoming.stream,
            tenant=ticket.tenant,
            request_class=plan.features.request_class.value,
            decision=plan.describe() if "decision" in incoming.include else {},
        )

    def _refuse_overlong(self, ticket: Ticket) -> None:
        prompt, limit = ticket.prompt, self.settings.model.max_model_len
        # An estimate refuses nothing: the engine counts, and what it truncates is its own matter.
        truncated = ticket.incoming.body.get("truncate_prompt_tokens") is not None
        if prompt is None or not prompt.exact or truncated:
            return
        if (longest := max(prompt.counts)) >= limit:
            raise ApiError(
                400,
                f"this model's maximum context length is {limit} tokens, and the prompt has {longest}",
                code="context_length_exceeded",
                param="messages" if ticket.incoming.endpoint is Endpoint.CHAT else "prompt",
            )

    def _deadline_s(self, ticket: Ticket, asked: Asked) -> float | None:
        """Of the event loop's clock; the time allowed runs from the request's arrival."""
        limits = [limit for limit in (asked.deadline_s, self.router.live.deadline_s) if limit is not None]
        passed_s = time.monotonic() - ticket.arrived_s
        return asyncio.get_running_loop().time() + min(limits) - passed_s if limits else None

    def _refusal(self, refusal: Refusal, plan: Plan, mode: str | None, lost: EngineLost | None) -> ApiError:
        wait_s = retry_after_s(refusal, self._engine_of, plan.snapshot, self.router.breaker_pauses_s())
        if lost is not None:
            after_s = str(_COMES_BACK_S if wait_s is None else wait_s)
            return ApiError(503, f"the engine was lost: {lost}", code=ENGINE_LOST, headers={"retry-after": after_s})
        message = f"{refusal.reason} {self.table.states(mode)}."
        if wait_s is None:
            # Waiting changes nothing; asking otherwise would.
            return ApiError(400, message, code=refusal.code.value)
        return ApiError(503, message, code=refusal.code.value, headers={"retry-after": str(wait_s)})

    # Other calls ------------------------------------------------------------------------------------------------

    async def reset_prefix_caches(self) -> dict[str, bool]:
        """Per engine, whether its cached prefixes are forgotten."""
        links = [link for link in self.links if link.ready]
        done = await asyncio.gather(*(link.reset_prefix_cache() for link in links))
        self.router.forget_prefixes()
        return dict(zip([link.name for link in links], done, strict=True))

    def tell_gauges(self) -> None:
        """Figures that are states and not events; called every few seconds."""
        for link in self.links:
            self._telemetry.set("modeswitch_in_flight", float(len(link.in_flight)), link.name)
            self._telemetry.set("modeswitch_engine_ready", float(link.ready), link.name)
            if link.status is not None:
                self._telemetry.set("modeswitch_kv_cache_use", link.status.kv_cache_usage, link.name)
        for mode in self.table.modes:
            opened = self.router.breaker(mode)[0].value != "closed"
            self._telemetry.set("modeswitch_breaker_open", float(opened), mode)
        self._telemetry.set("modeswitch_records_dropped", float(self._records.dropped_records))


def _why(plan: Plan, decision: Decision) -> str:
    """The decision's reason as one of a few words, for a label."""
    if plan.named:
        return "named"
    if decision.explored:
        return "explored"
    if decision.terms is not None:
        return "lowest_cost"
    return "lowest_score" if decision.policy == "learned" else decision.rule or "other"
