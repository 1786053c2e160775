"""What is read of a prompt before it is routed: its text, its tokens, and what names its conversation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from app.controller.tokens import Uncountable, prompts_of
from app.controller.wishes import choices_of
from app.routing.prefix_index import PromptChain, text_chain, token_chain
from app.routing.token_estimate import TokenEstimator
from app.wire import Endpoint

_COUNT_INLINE_BELOW_CHARS = 20_000
"""A longer prompt takes several milliseconds to tokenise: in a thread, so that other streams go on."""
T = TypeVar("T")


class Tokenizes(Protocol):
    """What is needed of `app.controller.tokens.TokenCounter`."""

    def count(self, body: Mapping[str, Any]) -> list[int]: ...
    def render(self, body: Mapping[str, Any]) -> str: ...
    def count_text(self, text: str, body: Mapping[str, Any]) -> int: ...


class Said(NamedTuple):
    """Hashes by which a conversation's turns recognise one another."""

    began: str
    """Of everything up to the first thing the user said."""
    so_far: str
    """Of everything."""
    before: str | None
    """Of everything before the last answer, which is what the turn before had so far; None for a first turn."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, or prompts: a completion may bring a list, which is answered as a whole."""

    text: str
    """As the model reads it where that is known; not kept after the request. Empty where it tells no tokens."""
    instruction: str
    """The last thing the user said: what the kind of work is told from."""
    counts: tuple[int, ...]
    """Tokens of each prompt, as many as the engine keeps."""
    choices: int
    """Answers that each prompt is to get."""
    exact: bool
    chain: PromptChain
    said: Said | None
    """For chats."""

    @property
    def tokens(self) -> int:
        """Of all prompts together: the answer is complete when the last is computed, so this is its prefill."""
        return max(1, sum(self.counts))

    @property
    def sequences(self) -> int:
        """What the engine decodes for it in one batch."""
        return self.choices * len(self.counts)


class PromptReader:
    """Reads prompts with the model's tokenizer; while there is none, or above a size, tokens are estimated.

    Args:
        exact_below_chars: the largest prompt that is tokenised; a larger one is estimated, and its estimate corrected
            by what the engine counts in the end.
        max_model_len: tokens of a prompt and its output together.
    """

    def __init__(self, tokenizer: Tokenizes | None, exact_below_chars: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._exact_below_chars = exact_below_chars
        self._max_model_len = max_model_len
        self._estimator = TokenEstimator()

    async def read(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Prompt:
        """The prompt of a request whose body was checked by `read_request`."""
        prompt = await (self._read_chat(body) if endpoint is Endpoint.CHAT else self._read_completion(body))
        kept_tokens = body.get("truncate_prompt_tokens")
        if not isinstance(kept_tokens, int) or kept_tokens < -1:
            return prompt
        # -1 keeps what leaves room for an output, give or take one: it depends on what output was asked for.
        exact = prompt.exact and kept_tokens >= 0
        most = kept_tokens if kept_tokens >= 0 else self._max_model_len - 1
        # What is left of the text would have fewer tokens, and teaches nothing of characters per token.
        return replace(prompt, text="", counts=tuple(min(count, most) for count in prompt.counts), exact=exact)

    def counted(self, prompt: Prompt, prompt_tokens: int) -> None:
        """The engine's count of a prompt that was estimated."""
        if not prompt.exact:
            self._estimator.observe(prompt.text, prompt_tokens)

    async def _read_chat(self, body: Mapping[str, Any]) -> Prompt:
        messages = body["messages"]
        text, known = _text_of(messages), False
        if self.tokenizer is not None:
            with contextlib.suppress(Uncountable):
                text, known = self.tokenizer.render(body), True
        tokens, exact = await self._count(text, body) if known else (self._estimator.estimate(text), False)
        users = [message for message in messages if message["role"] == "user"]
        return Prompt(
            text,
            _text_of(users[-1:]),
            (tokens,),
            choices_of(body),
            exact,
            text_chain(text, str(body.get("cache_salt") or "")),
            said(messages),
        )

    async def _read_completion(self, body: Mapping[str, Any]) -> Prompt:
        prompt, salt, choices = body.get("prompt"), str(body.get("cache_salt") or ""), choices_of(body)
        if (lists := _token_ids(body)) is not None:
            # One after the other, as texts are: what begins like an earlier list of prompts is found in the cache.
            chain = token_chain([token for tokens in lists for token in tokens], salt)
            return Prompt("", "", tuple(map(len, lists)), choices, True, chain, None)
        texts = [_text_of(one) for one in prompts_of(body)]
        text = "\n".join(texts)
        counts, exact = [self._estimator.estimate(one) for one in texts], False
        if self.tokenizer is not None and len(text) < self._exact_below_chars:
            with contextlib.suppress(Uncountable):
                counts, exact = await self._in_time(len(text), self.tokenizer.count, body), True
        if exact and isinstance(prompt, str):
            self._estimator.observe(text, counts[0])
        return Prompt(text, text, tuple(counts), choices, exact, text_chain(text, salt), None)

    async def _count(self, text: str, body: Mapping[str, Any]) -> tuple[int, bool]:
        if self.tokenizer is None or len(text) >= self._exact_below_chars:
            return self._estimator.estimate(text), False
        tokens = await self._in_time(len(text), self.tokenizer.count_text, text, body)
        self._estimator.observe(text, tokens)
        return tokens, True

    async def _in_time(self, chars: int, count: Callable[..., T], *args: Any) -> T:
        if chars < _COUNT_INLINE_BELOW_CHARS:
            return count(*args)
        return await asyncio.to_thread(count, *args)


def said(messages: list[dict[str, Any]]) -> Said:
    """What names the conversation that a chat's messages are of."""
    digest = hashlib.blake2b(digest_size=12)
    began = before = None
    for message in messages:
        role = message["role"]
        if role == "assistant":
            before = digest.hexdigest()
        parts = [role, message.get("content"), message.get("tool_calls")]
        for text in (part if isinstance(part, str) else json.dumps(part, default=str) for part in parts if part):
            digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
        if began is None and role == "user":
            began = digest.hexdigest()
    so_far = digest.hexdigest()
    return Said(began or so_far, so_far, before)


def _token_ids(body: Mapping[str, Any]) -> list[list[int]] | None:
    """A completion's prompts, where all of them are token ids."""
    prompts = prompts_of(body)
    # Every item is looked at: as text, what is not text would be empty lines, the same for all prompts.
    given = all(isinstance(prompt, list) and set(map(type, prompt)) == {int} for prompt in prompts)
    return prompts if given else None


def _text_of(value: Any) -> str:
    """All text in a JSON value, in order."""
    match value:
        case str():
            return value
        case dict():
            return _text_of(value.get("content") or value.get("text") or "")
        case list():
            return "\n".join(_text_of(item) for item in value)
    return ""
