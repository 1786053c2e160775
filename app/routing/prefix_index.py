"""What each engine has recently been sent, to expect how much of a prompt its cache still holds.

A prompt becomes a chain of hashes, one per block, each covering everything before it; two prompts share a prefix as
far as their chains agree. Blocks have one size at the start and grow with the position (about 1.6 % of it), so that
a prompt of a million characters costs hundreds of blocks and not thousands.

Per engine there are two generations of hashes. When the young one is full it becomes the old one and the old one is
dropped: least-recently-used eviction in large steps, without bookkeeping per entry. A prompt is recorded whole into
one generation, so each generation holds every prefix of what it holds, and the longest match is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

CHARS_PER_BLOCK = 256
TOKENS_PER_BLOCK = 64
_EQUAL_BLOCKS = 64
_MAX_BLOCKS = 640


def _boundaries(block: int) -> tuple[int, ...]:
    ends = [block * (number + 1) for number in range(_EQUAL_BLOCKS)]
    while len(ends) < _MAX_BLOCKS:
        ends.append(ends[-1] + max(block, ends[-1] // _EQUAL_BLOCKS))
    return tuple(ends)


_CHAR_BOUNDARIES = _boundaries(CHARS_PER_BLOCK)
_TOKEN_BOUNDARIES = _boundaries(TOKENS_PER_BLOCK)


class PromptChain(NamedTuple):
    """Hashes of a prompt's prefixes, shortest first; `boundaries[i]` is the length that `hashes[i]` covers.

    Lengths count characters or tokens, as `total` does. Hashes are valid within one process.
    """

    hashes: list[int]
    boundaries: tuple[int, ...]
    total: int

    def covered(self, blocks: int) -> int:
        """Length of the prefix made of the first `blocks` blocks."""
        return self.boundaries[blocks - 1] if blocks else 0


def text_chain(text: str, salt: str = "") -> PromptChain:
    """The chain of a rendered prompt. Prompts with different cache salts share nothing."""
    link = hash(("text", salt))
    hashes: list[int] = []
    start = 0
    for end in _CHAR_BOUNDARIES[: bisect_right(_CHAR_BOUNDARIES, len(text))]:
        link = hash((link, text[start:end]))
        hashes.append(link)
        start = end
    return PromptChain(hashes, _CHAR_BOUNDARIES, len(text))


def token_chain(tokens: Sequence[int], salt: str = "") -> PromptChain:
    """The chain of a prompt that came as token ids."""
    link = hash(("tokens", salt))
    hashes: list[int] = []
    start = 0
    for end in _TOKEN_BOUNDARIES[: bisect_right(_TOKEN_BOUNDARIES, len(tokens))]:
        link = hash((link, *tokens[start:end]))
        hashes.append(link)
        start = end
    return PromptChain(hashes, _TOKEN_BOUNDARIES, len(tokens))


class RecentPrefixes:
    """The prefixes recently recorded, at most `max_prefixes` and about `capacity_tokens` tokens' worth.

    With a capacity equal to the engine's KV cache it forgets about when the engine does.
    """

    __slots__ = ("_generation_prefixes", "_generation_tokens", "_old", "_young", "_young_tokens")

    def __init__(self, max_prefixes: int, capacity_tokens: int | None = None) -> None:
        self._generation_prefixes = max(1, max_prefixes // 2)
        self._generation_tokens = None if capacity_tokens is None else max(1, capacity_tokens // 2)
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._young_tokens = 0.0

    def __len__(self) -> int:
        """Prefixes held; one in both generations counts twice."""
        return len(self._young) + len(self._old)

    def record(self, chain: PromptChain, prompt_tokens: int) -> None:
        """Remember every prefix of a prompt of `prompt_tokens` tokens. A prompt below one block leaves nothing."""
        hashes = chain.hashes[: self._generation_prefixes]
        if not hashes:
            return
        young = self._young
        if len(young) + len(hashes) > self._generation_prefixes or (
            self._generation_tokens is not None and self._young_tokens >= self._generation_tokens
        ):
            self._old, self._young = young, set()
            self._young_tokens = 0.0
            young = self._young
        before = len(young)
        young.update(hashes)
        # Only what is new takes room in the engine's cache.
        self._young_tokens += prompt_tokens * (len(young) - before) / len(hashes)

    def matched_blocks(self, chain: PromptChain) -> int:
        """Blocks of the longest recorded prefix of the prompt."""
        hashes = chain.hashes
        matched = _longest(hashes, self._young)
        if self._old and matched < len(hashes):
            matched = max(matched, _longest(hashes, self._old))
        return matched


def _longest(hashes: list[int], known: set[int]) -> int:
    # The whole prompt first: repeated prompts are common, and every probe of a large set misses the CPU's caches.
    if not hashes:
        return 0
    if hashes[-1] in known:
        return len(hashes)
    if hashes[0] not in known:
        return 0
    # known: hashes[low - 1]; unknown: hashes[high - 1].
    low, high = 1, len(hashes)
    while high - low > 1:
        middle = (low + high) // 2
        if hashes[middle - 1] in known:
            low = middle
        else:
            high = middle
    return low


class PrefixIndex:
    """Recent prefixes of every engine, and of all requests together.

    An engine's prefixes belong to one life of it: a new epoch starts empty, since its cache does. What was recorded
    for one engine never counts for another. Names that are not known (an engine just removed) are ignored.
    """

    __slots__ = ("_engines", "_epochs", "_max_prefixes", "_seen")

    def __init__(self, max_prefixes_per_engine: int = 200_000) -> None:
        self._max_prefixes = max_prefixes_per_engine
        self._engines: dict[str, RecentPrefixes] = {}
        self._epochs: dict[str, int] = {}
        self._seen = RecentPrefixes(max_prefixes_per_engine)

    def follow(self, engine: str, epoch: int, capacity_tokens: int | None = None) -> None:
        """State the life an engine is in; call it with every status, a repeated epoch changes nothing.

        `capacity_tokens` is the size of the engine's KV cache, where it is known.
        """
        if self._epochs.get(engine) != epoch:
            self._epochs[engine] = epoch
            self._engines[engine] = RecentPrefixes(self._max_prefixes, capacity_tokens)

    def forget(self, engine: str) -> None:
        """The engine is gone, or its cache was reset: nothing is cached there until the next `follow`."""
        self._engines.pop(engine, None)
        self._epochs.pop(engine, None)

    def record(self, chain: PromptChain, prompt_tokens: int, engine: str | None) -> None:
        """A prompt was sent to `engine` by a mode that keeps its blocks; `engine` is None for one that does not."""
        self._seen.record(chain, prompt_tokens)
        if engine is not None:
            prefixes = self._engines.get(engine)
            if prefixes is not None:
                prefixes.record(chain, prompt_tokens)

    def seen_tokens(self, chain: PromptChain, prompt_tokens: int) -> int:
        """Tokens of the prompt that begin some recent prompt, whatever mode it went to."""
        return _tokens(chain, self._seen.matched_blocks(chain), prompt_tokens)

    def cached_tokens(self, chain: PromptChain, prompt_tokens: int) -> dict[str, int]:
        """Tokens of the prompt expected in each engine's cache; engines with none are left out."""
        found: dict[str, int] = {}
        for engine, prefixes in self._engines.items():
            blocks = prefixes.matched_blocks(chain)
            if blocks:
                found[engine] = _tokens(chain, blocks, prompt_tokens)
        return found


def _tokens(chain: PromptChain, blocks: int, prompt_tokens: int) -> int:
    if not blocks:
        return 0
    tokens = prompt_tokens * chain.covered(blocks) // chain.total
    # An engine computes at least the last token of a prompt, so never all of it is cached.
    return tokens if tokens < prompt_tokens else prompt_tokens - 1
