"""How far a mode's own answers stray from the reference's, token by token for as long as both write the same.

A text that is read in one pass never touches what a combination can break: vLLM reads no cached prefix for it and
drafts nothing, and a backend may use its KV cache only while it generates. So a mode that reuses prefixes is asked
everything twice, and the answer from its cache is the one that is compared; one that speculates must have drafted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from loadgen.client import COMPLETION_PATH, OpenAIClient
from loadgen.fidelity import TOP_TOKENS, FidelityUnavailable, all_of, bucketed_kl, post_json
from loadgen.quality_gate import Divergence
from loadgen.server_facts import engines, model_name

_OUTPUT_TOKENS = 8
_CACHED_SHARE_MIN = 0.5
"""Of the tokens of all repeated prompts: a cache holds whole blocks only, and a prompt's last one is computed anew."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Why a mode's own answers are wanted."""

    engine: str
    reuses_prefixes: bool
    kv_dtype: str | None
    """Of its KV cache, where it is not the model's own."""
    speculates: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A greedy answer. `tops` has the natural logarithms of the most probable tokens at each place."""

    prompt_tokens: int
    tokens: tuple[str, ...]
    tops: tuple[Mapping[str, float], ...]


def wanted_answers(overview: Mapping[str, Any]) -> dict[str, Wanted]:
    """From `GET /v1/modes`: the ready modes whose text reading shows less than they do.

    Lossless ones too: one that somebody wants judged all the same must not pass by what shows nothing of it.
    """
    rows = [row for row in overview.get("data") or () if isinstance(row, dict)]
    states = {row.get("name"): row for row in overview.get("engines") or () if isinstance(row, dict)}
    found = {}
    for row in rows:
        if row.get("state") != "ready":
            continue
        engine = str(row.get("engine") or row.get("id"))
        args, delta = (states.get(engine) or {}).get("engine_args") or {}, row.get("engine_delta") or {}
        kv_dtype = delta.get("kv_cache_dtype") or args.get("kv_cache_dtype")
        wanted = Wanted(
            engine,
            bool(row.get("prefix_reuse")),
            None if kv_dtype in (None, "auto") else str(kv_dtype),
            bool(delta.get("speculative_config") or args.get("speculative_config")),
        )
        if wanted.reuses_prefixes or wanted.kv_dtype or wanted.speculates:
            found[str(row["id"])] = wanted
    return found


async def measure_answers(
    client: OpenAIClient,
    served: str,
    reference_mode: str,
    modes: Mapping[str, Wanted],
    texts: Sequence[str],
    found: dict[str, list[Divergence]],
    *,
    top_tokens: int = TOP_TOKENS,
    concurrency: int = 2,
) -> None:
    """Lets the reference and every mode continue every text; a mode is in `found` once all of its answers are there.

    Raises ServerFault, and FidelityUnavailable: at once for answers without log-probabilities, in the end for modes of
    which the server does not show that repeated prompts came from the cache, or that tokens were drafted.
    """
    slots = asyncio.Semaphore(concurrency)

    async def answer(mode: str, text: str, asks: int = 1) -> Written:
        async with slots:
            for _ in range(asks):
                written = await write(client, model_name(served, mode), text, top_tokens)
            return written

    references = await all_of(answer(reference_mode, text) for text in texts)
    unshown = []
    for mode, wanted in modes.items():
        before = await _counters(client, wanted.engine)
        answers = await all_of(answer(mode, text, 2 if wanted.reuses_prefixes else 1) for text in texts)
        after = await _counters(client, wanted.engine)
        if why := _not_shown(mode, wanted, before, after, sum(written.prompt_tokens for written in answers)):
            unshown.append(why)
        else:
            found[mode] = [divergence(*pair) for pair in zip(references, answers, strict=True)]
    if unshown:
        raise FidelityUnavailable("; ".join(unshown))


async def write(client: OpenAIClient, model: str, text: str, top_tokens: int = TOP_TOKENS) -> Written:
    """A short continuation of `text`. Raises FidelityUnavailable for an answer without log-probabilities."""
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": _OUTPUT_TOKENS,
        "temperature": 0,
        "logprobs": top_tokens,
        # Different tokens may read alike.
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    answer = await post_json(client, COMPLETION_PATH, body)
    try:
        seen = answer["choices"][0]["logprobs"]
        tops = tuple({str(token): float(value) for token, value in top.items()} for top in seen["top_logprobs"])
        written = Written(int(answer["usage"]["prompt_tokens"]), tuple(map(str, seen["tokens"])), tops)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FidelityUnavailable(
            f"{client.base_url}: {model} answers without usable logprobs ({type(error).__name__}: {error})"
        ) from error
    if not written.tokens or len(written.tokens) != len(written.tops):
        raise FidelityUnavailable(f"{client.base_url}: {model} gives no log-probabilities for its answer")
    return written


def divergence(reference: Written, other: Written) -> Divergence:
    """Means over the tokens up to the first that differs, itself included: until there both have read the same."""
    alike = 1
    for mine, theirs in zip(reference.tokens, other.tokens, strict=False):
        if mine != theirs:
            break
        alike += 1
    found = [bucketed_kl(*pair) for pair in zip(reference.tops[:alike], other.tops[:alike], strict=False)]
    return Divergence(fmean(item.kl_nats for item in found), fmean(item.covered for item in found))


@dataclass(frozen=True, slots=True)
class _Counters:
    """Of an engine, since it started: prompt tokens from its cache, and drafted ones. None where it does not tell."""

    cached: int | None = None
    drafted: int | None = None


async def _counters(client: OpenAIClient, engine: str) -> _Counters:
    for state in await engines(client) or []:
        if state.get("name") == engine:
            told = (state.get(counter) for counter in ("prefix_hits_tokens", "draft_tokens"))
            return _Counters(*(count if isinstance(count, int) else None for count in told))
    return _Counters()


def _not_shown(mode: str, wanted: Wanted, before: _Counters, after: _Counters, repeated_tokens: int) -> str | None:
    """Why answers say nothing of what they are wanted for; None where they do."""
    if wanted.reuses_prefixes:
        if before.cached is None or after.cached is None:
            return f"the server does not tell what {wanted.engine} takes from its cache"
        cached = after.cached - before.cached
        if cached < _CACHED_SHARE_MIN * repeated_tokens:
            return f"{mode} took only {cached} of {repeated_tokens} repeated prompt tokens from its cache"
    if wanted.speculates:
        if before.drafted is None or after.drafted is None:
            return f"the server does not tell what {wanted.engine} drafts"
        if after.drafted <= before.drafted:
            return f"{mode} drafted nothing for its answers"
    return None
