"""What the controller does with a request, free of Ray: count, choose, call an engine, pass the answer on."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.config import Settings
from app.controller.body import Incoming
from app.controller.choice import Choice, ModeTable
from app.controller.errors import ApiError
from app.controller.links import EngineLink, EngineLost
from app.controller.tokens import Uncountable
from app.wire import Call, Endpoint, Reply, Started

log = logging.getLogger("ray.serve")
_COUNT_INLINE_BELOW_CHARACTERS = 20_000
"""A longer prompt takes several milliseconds to tokenise: in a thread, so that other streams go on."""


class CountsTokens(Protocol):
    def count(self, endpoint: Endpoint, body: Mapping[str, Any]) -> int: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send: headers, and a whole reply or the frames of a stream."""

    headers: dict[str, str]
    reply: Reply | None = None
    frames: AsyncIterator[str] | None = None


class Service:
    """Owns the engine links and the in-flight counts; one per controller process."""

    def __init__(self, settings: Settings, links: Sequence[EngineLink], counter: CountsTokens | None) -> None:
        self.settings = settings
        self.links = tuple(links)
        self.table = ModeTable(
            settings.model.served_name,
            self.links,
            [mode.name for mode in settings.resolved_modes],
            settings.controller.default_mode,
        )
        self._counter = counter

    async def answer(self, incoming: Incoming) -> Answer:
        """Serve one request.

        Raises:
            ApiError: the request is refused, or no engine could answer.
        """
        candidates = self.table.candidates(incoming.model)
        prompt_tokens = await self._count(incoming)
        self._refuse_overlong(prompt_tokens)
        lost: EngineLost | None = None
        for choice in candidates:
            call = self._call(incoming, choice)
            try:
                answer = await choice.link.start(call, incoming.stream)
            except EngineLost as error:
                log.warning("request %s: engine %s: %s", incoming.request_id, choice.link.name, error)
                lost = error
                continue
            headers = _headers(incoming, choice, prompt_tokens)
            if isinstance(answer, Started):
                return Answer(headers, frames=choice.link.rest(call, answer))
            return Answer(headers, reply=answer)
        raise ApiError(503, f"the engine was lost: {lost}", code="engine_lost", headers={"retry-after": "5"})

    async def reset_prefix_caches(self) -> dict[str, bool]:
        """Per engine, whether its cached prefixes are forgotten."""
        links = [link for link in self.links if link.ready]
        return await _by_name(links, [link.reset_prefix_cache() for link in links])

    async def _count(self, incoming: Incoming) -> int | None:
        """Prompt tokens, or None where only the engine can tell."""
        if self._counter is None:
            return None
        try:
            if _characters(incoming.body) < _COUNT_INLINE_BELOW_CHARACTERS:
                return self._counter.count(incoming.endpoint, incoming.body)
            return await asyncio.to_thread(self._counter.count, incoming.endpoint, incoming.body)
        except Uncountable:
            return None

    def _refuse_overlong(self, prompt_tokens: int | None) -> None:
        limit = self.settings.model.max_model_len
        if prompt_tokens is not None and prompt_tokens >= limit:
            raise ApiError(
                400,
                f"this model's maximum context length is {limit} tokens, and the prompt has {prompt_tokens}",
                code="context_length_exceeded",
                param="messages",
            )

    def _call(self, incoming: Incoming, choice: Choice) -> Call:
        body = {**incoming.body, "model": self.table.served_name, "request_id": incoming.request_id}
        if choice.link.spec.prefix_caching and not choice.mode.prefix_reuse:
            # The engine caches prefixes for another mode it carries; a salt of its own keeps this request from reuse.
            body["cache_salt"] = uuid.uuid4().hex
        return Call(uuid.uuid4().hex, incoming.request_id, incoming.endpoint, choice.mode.name, body, incoming.include)


def _headers(incoming: Incoming, choice: Choice, prompt_tokens: int | None) -> dict[str, str]:
    headers = {
        "x-modeswitch-mode": choice.mode.name,
        "x-modeswitch-engine": choice.link.name,
    }
    if prompt_tokens is not None:
        headers["x-modeswitch-prompt-tokens"] = str(prompt_tokens)
    return headers


def _characters(value: Any) -> int:
    """Characters of text in a JSON value."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(_characters(item) for item in value.values())
        case list():
            return sum(_characters(item) for item in value)
    return 1


async def _by_name(links: Sequence[EngineLink], results: Sequence[Awaitable[bool]]) -> dict[str, bool]:
    return dict(zip([link.name for link in links], await asyncio.gather(*results), strict=True))
