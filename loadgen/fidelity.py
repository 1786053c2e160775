"""How far a mode strays from the reference on given text: KL, perplexity and agreement, teacher-forced.

Every mode reads the same text and says how probable it found each token, so one prompt gives hundreds of paired
observations; a small model, whose right answers are near chance, is resolved all the same.

Text is read in one pass, and vLLM reads no cached prefix and drafts nothing for it. What a mode loses only while it
generates, such as through a compressed KV cache, a reused prefix or drafts, shows in answers alone: see
`answer_fidelity`.
"""

import asyncio
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from math import exp, log
from statistics import fmean
from types import ModuleType
from typing import Any, TypeVar

import aiohttp

from loadgen.client import COMPLETION_PATH, OpenAIClient, ServerFault, classify, json_object
from loadgen.quality_gate import Divergence
from loadgen.records import Outcome
from loadgen.server_facts import model_name

TOP_TOKENS = 100
"""Log-probabilities asked for at a position: what this application allows, and of a small model enough to judge by."""
TOP_TOKENS_VLLM = 20
"""What vLLM allows where it was told nothing else."""
Key = TypeVar("Key", int, str)
Result = TypeVar("Result")

# About 120 tokens: long enough to judge, short enough for a slow machine to read the least number of texts.
_TEXT_CHARACTERS = 500
# "Requested prompt logprobs of 100, which is greater than max allowed: 20"
_ALLOWED = re.compile(r"max allowed: (\d+)")
# Long docstrings, and nothing happens on import.
_MODULES = """
argparse ast asyncio bisect calendar codecs collections concurrent.futures contextlib csv ctypes.util dataclasses
datetime decimal difflib dis email.message enum fractions functools gettext hashlib heapq http.client inspect
ipaddress itertools json locale logging mailbox math multiprocessing optparse os pathlib pickle pickletools platform
random re sched shutil smtplib socket sqlite3 statistics string struct subprocess tarfile tempfile textwrap threading
timeit tokenize traceback typing unittest urllib.parse uuid weakref zipfile
"""


class FidelityUnavailable(Exception):
    """The server gives no log-probabilities of a prompt; the message says what it answered."""


@dataclass(frozen=True, slots=True)
class Token:
    """One position of a text as a model saw it. `top` is by token id; probabilities are natural logarithms."""

    token_id: int
    logprob: float
    top: Mapping[int, float]

    @property
    def greedy_id(self) -> int:
        return max(self.top, key=lambda token_id: self.top[token_id])


@dataclass(frozen=True, slots=True)
class TextFidelity:
    """A mode against the reference on text number `text`; means over its tokens."""

    mode: str
    text: int
    tokens: int
    kl_nats: float
    covered: float  # share of the reference's probability on the tokens that were compared one by one
    delta_logprob: float  # mode minus reference, of the text's own tokens
    delta_logprob_abs: float
    greedy_agreement: float  # share of positions with the same most probable token

    @property
    def perplexity_ratio(self) -> float:
        """The mode's perplexity of the text over the reference's."""
        return exp(-self.delta_logprob)

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.kl_nats, self.covered)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


async def allowed_top_tokens(client: OpenAIClient, models: Iterable[str]) -> int:
    """How many log-probabilities at a position all of these models give: `TOP_TOKENS`, or fewer on a strict server.

    Raises ServerFault where one of them answers nothing at all.
    """
    fewest = TOP_TOKENS
    for model in models:
        try:
            await post_json(client, COMPLETION_PATH, _reading(model, "a", fewest))
        except ServerFault as fault:
            if "logprobs" not in str(fault):
                raise
            told = _ALLOWED.search(str(fault))
            fewest = min(fewest, int(told[1]) if told else TOP_TOKENS_VLLM)
    return fewest


def fewer_words(base_url: str, top_tokens: int) -> str | None:
    """What is to be said where a server gives fewer log-probabilities than are wanted."""
    if top_tokens >= TOP_TOKENS:
        return None
    return (
        f"{base_url} gives only {top_tokens} log-probabilities at a position, not {TOP_TOKENS}: less is compared, and "
        "a mode may lack evidence for it (vLLM's --max-logprobs raises the limit)."
    )


async def measure_fidelity(
    client: OpenAIClient,
    served: str,
    reference_mode: str,
    modes: Sequence[str],
    texts: Sequence[str],
    *,
    top_tokens: int = TOP_TOKENS,
    concurrency: int = 2,
    on_text: Callable[[TextFidelity], None] | None = None,
) -> list[TextFidelity]:
    """Compares every mode with the reference on every text.

    served: the model's name without a mode. on_text: called with each result at once, so that an interruption loses
    none. Raises FidelityUnavailable, and ServerFault with the server's words.
    """
    found: list[TextFidelity] = []
    slots = asyncio.Semaphore(concurrency)

    async def one(index: int, text: str) -> None:
        async with slots:
            reference = await read_text(client, model_name(served, reference_mode), text, top_tokens)
            for mode in modes:
                seen = await read_text(client, model_name(served, mode), text, top_tokens)
                result = compare(mode, index, reference, seen)
                found.append(result)
                if on_text is not None:
                    on_text(result)

    await all_of([one(index, text) for index, text in enumerate(texts)])
    return found


async def all_of(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. The first exception ends the other parts too, and passes through."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reading(model: str, text: str, top_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_tokens}


async def read_text(client: OpenAIClient, model: str, text: str, top_tokens: int = TOP_TOKENS) -> list[Token]:
    """Every token of `text` but the first, which nothing precedes, as `model` sees it.

    Raises FidelityUnavailable for an answer without vLLM's `prompt_logprobs`, and ServerFault.
    """
    answer = await post_json(client, COMPLETION_PATH, _reading(model, text, top_tokens))
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        # vLLM puts the token that stands in the text first, then the most probable ones.
        tokens = [_token({int(key): float(item["logprob"]) for key, item in row.items()}) for row in rows if row]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FidelityUnavailable(
            f"{client.base_url}: {model} answers without usable prompt_logprobs ({type(error).__name__}: {error})"
        ) from error
    if not tokens:
        raise FidelityUnavailable(f"{client.base_url}: {model} gives no log-probabilities for a prompt")
    return tokens


def _token(seen: Mapping[int, float]) -> Token:
    actual = next(iter(seen))
    return Token(actual, seen[actual], seen)


def compare(mode: str, text: int, reference: Sequence[Token], other: Sequence[Token]) -> TextFidelity:
    """Raises FidelityUnavailable when the two did not read the same tokens."""
    if [token.token_id for token in reference] != [token.token_id for token in other]:
        raise FidelityUnavailable(f"{mode} cuts text {text} into other tokens than the reference: no pairs")
    divergences = [bucketed_kl(left.top, right.top) for left, right in zip(reference, other, strict=True)]
    deltas = [right.logprob - left.logprob for left, right in zip(reference, other, strict=True)]
    return TextFidelity(
        mode=mode,
        text=text,
        tokens=len(deltas),
        kl_nats=fmean(item.kl_nats for item in divergences),
        covered=fmean(item.covered for item in divergences),
        delta_logprob=fmean(deltas),
        delta_logprob_abs=fmean(abs(delta) for delta in deltas),
        greedy_agreement=fmean(left.greedy_id == right.greedy_id for left, right in zip(reference, other, strict=True)),
    )


def bucketed_kl(reference: Mapping[Key, float], other: Mapping[Key, float]) -> Divergence:
    """KL(reference || other) over the tokens that both list, the rest being one bucket.

    Merging outcomes never raises a KL (data processing inequality), so this is a lower bound, and a close one where
    `covered` is near 1. Source: Cover and Thomas, Elements of Information Theory, section 2.8.
    """
    shared = reference.keys() & other.keys()
    p = [exp(reference[key]) for key in shared]
    q = [exp(other[key]) for key in shared]
    covered = min(1.0, sum(p))
    # Rounding leaves sums a little off 1; the floor keeps the rest bucket from dividing by nothing.
    rest_p, rest_q = max(1.0 - sum(p), 0.0), max(1.0 - sum(q), 1e-9)
    terms = [left * (log(left) - log(right)) for left, right in zip(p, q, strict=True) if left > 0 and right > 0]
    rest = rest_p * log(rest_p / rest_q) if rest_p > 0 else 0.0
    return Divergence(max(0.0, sum(terms) + rest), covered)


def stdlib_texts(count: int) -> list[str]:
    """Passages from docstrings of Python's library, the same ones on one version of Python.

    They belong to no data set and no calibration: the quantizer's own passages are from the language reference.
    """
    return list(islice(_passages(), count))


def code_texts(count: int) -> list[str]:
    """Passages of the source of Python's library, the same ones on one version of Python; none where it has none."""
    return list(islice(_sources(), count))


def _sources() -> Iterator[str]:
    for module in _modules():
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):  # a Python without its sources, or a module written in C
            continue
        # One of each module, from where its first function begins: what stands above is prose and imports.
        start = max(0, text.find("\ndef "))
        if len(text) - start > _TEXT_CHARACTERS:
            yield text[start : start + _TEXT_CHARACTERS].lstrip()


def _modules() -> Iterator[ModuleType]:
    for name in _MODULES.split():
        if name.partition(".")[0] in sys.stdlib_module_names:
            with suppress(ImportError):  # a Python built without it, such as one without tkinter
                yield import_module(name)


def _passages() -> Iterator[str]:
    seen: set[str] = set()
    for module in _modules():
        parts = [f"{item}: {words}" for item, words in _docstrings(module) if words not in seen]
        seen.update(words for _, words in _docstrings(module))
        text = "\n\n".join(parts)
        for start in range(0, len(text) - _TEXT_CHARACTERS, _TEXT_CHARACTERS):
            yield text[start : start + _TEXT_CHARACTERS]


def _docstrings(module: Any) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__:
            words = inspect.getdoc(value)
            if words and len(words) > 100:
                yield name, words


async def post_json(client: OpenAIClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole JSON answer to a request that is not timed. Raises ServerFault with the outcome and the words."""
    url = client.base_url + path
    try:
        async with client.session.post(url, json=body) as response:
            content = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFault(classify(error), f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error
    if not 200 <= response.status < 300:
        words = content[:300].decode(errors="replace")
        raise ServerFault(Outcome.HTTP_ERROR, f"{url}: HTTP {response.status}: {words}")
    return json_object(content, url)
