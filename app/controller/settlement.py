"""What is done once a request is over, in whatever way: settle what was reserved, learn, measure, record."""

from __future__ import annotations

import time
from typing import Protocol

from app.controller.links import took
from app.controller.plan import Ticket
from app.controller.prompts import PromptReader
from app.controller.router import Router
from app.controller.tenants import Tenants
from app.energy.rows import RequestRecord
from app.openai_errors import ENGINE_LOST
from app.routing.decision import Decision
from app.telemetry import Telemetry
from app.wire import Usage


class TakesRecords(Protocol):
    """Where records go: `app.energy.client.RecordSender`."""

    dropped_records: int

    def put(self, record: RequestRecord) -> None: ...


class Settlement:
    """Every ticket comes here once, by `close` or by `give_up`. `usage` is what the engine counted, where it told."""

    def __init__(
        self, router: Router, prompts: PromptReader, tenants: Tenants, records: TakesRecords, telemetry: Telemetry
    ) -> None:
        self._router = router
        self._prompts = prompts
        self._tenants = tenants
        self._records = records
        self._telemetry = telemetry

    def give_up(self, ticket: Ticket, status: str, code: str | None = None) -> None:
        """The request ended without an answer: close it, once the engine that has it tells what it took."""
        if ticket.link is None:
            self.close(ticket, status, None, code)
            return
        given_up = ticket.link.give_up(ticket.key)
        given_up.add_done_callback(lambda done: self.close(ticket, status, took(done), code))

    def close(self, ticket: Ticket, status: str, usage: Usage | None, code: str | None = None) -> None:
        """The request is over."""
        decision = _decision_that_was_sent(ticket)
        self._settle(ticket, usage, sent=decision is not None)
        if decision is not None:
            ratio = self._learn(ticket, decision, status, usage, code)
            self._measure(ticket, decision, status, usage, ratio)
        self._records.put(ticket.record(status, usage, code))

    def _settle(self, ticket: Ticket, usage: Usage | None, sent: bool) -> None:
        """Replace what the tenant has reserved by what was used; the prompt alone where the engine cannot tell."""
        if ticket.admission is None or ticket.prompt is None:
            return
        if usage is not None:
            used = (usage.prompt_tokens, usage.output_tokens)
        else:
            used = (ticket.prompt.tokens, 0) if sent else (0, 0)
        self._tenants.settle(ticket.admission, *used, time.monotonic())

    def _learn(
        self, ticket: Ticket, decision: Decision, status: str, usage: Usage | None, code: str | None
    ) -> float | None:
        """Tell the router how it went; returns observed/predicted latency where that can be told."""
        if status == "ok":
            if ticket.prompt is not None and usage is not None and usage.prompt_tokens:
                self._prompts.counted(ticket.prompt, usage.prompt_tokens)
            return self._router.succeeded(ticket, usage)
        if code == ENGINE_LOST:
            self._router.failed(decision.mode)
        else:
            self._router.ended(decision.mode, ticket.dispatched_s)
        return None

    def _measure(
        self, ticket: Ticket, decision: Decision, status: str, usage: Usage | None, ratio: float | None
    ) -> None:
        observe, mode = self._telemetry.observe, decision.mode
        self._telemetry.count("modeswitch_requests_total", mode, status)
        if usage is not None:
            # Those of a request that was given up cost joules as well.
            self._telemetry.count("modeswitch_generated_tokens_total", mode, by=float(usage.output_tokens))
        if usage is None or status != "ok":
            return
        assert ticket.dispatched_s is not None
        observe("modeswitch_request_ms", (time.monotonic() - ticket.arrived_s) * 1e3, mode)
        observe("modeswitch_prompt_tokens", float(usage.prompt_tokens), mode)
        observe("modeswitch_output_tokens", float(usage.output_tokens), mode)
        if usage.queued_ms is not None:
            observe("modeswitch_queue_ms", usage.queued_ms, mode)
        if usage.first_token_ms is not None and usage.last_token_ms is not None:
            before_ms = (ticket.dispatched_s - ticket.arrived_s) * 1e3
            observe("modeswitch_first_token_ms", before_ms + usage.first_token_ms, mode)
            assert ticket.prompt is not None
            if (later_tokens := usage.output_tokens / ticket.prompt.sequences - 1) > 0:
                token_ms = (usage.last_token_ms - usage.first_token_ms) / later_tokens
                observe("modeswitch_token_ms", token_ms, mode)
        if ratio is not None:
            observe("modeswitch_predicted_ratio", ratio, mode)


def _decision_that_was_sent(ticket: Ticket) -> Decision | None:
    """The decision by which an engine has, or had, the request; None when none got it, or it was lost with one."""
    outcome = ticket.plan.outcome if ticket.plan is not None else None
    return outcome if isinstance(outcome, Decision) and ticket.link is not None else None
