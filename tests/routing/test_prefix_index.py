import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.prefix_index import (
    CHARS_PER_BLOCK,
    TOKENS_PER_BLOCK,
    PrefixIndex,
    RecentPrefixes,
    text_chain,
    token_chain,
)

BLOCK = CHARS_PER_BLOCK
texts = st.lists(st.integers(0, 3), max_size=12).map(lambda blocks: "".join("abcd"[n] * BLOCK for n in blocks))


def common_blocks(one: str, other: str) -> int:
    blocks = 0
    while (blocks + 1) * BLOCK <= min(len(one), len(other)) and (
        one[blocks * BLOCK : (blocks + 1) * BLOCK] == other[blocks * BLOCK : (blocks + 1) * BLOCK]
    ):
        blocks += 1
    return blocks


@given(st.lists(texts, max_size=8), texts)
def test_the_longest_recorded_prefix_is_found(recorded: list[str], asked: str) -> None:
    prefixes = RecentPrefixes(10_000)
    for text in recorded:
        prefixes.record(text_chain(text), 100)
    expected = max((common_blocks(text, asked) for text in recorded), default=0)
    assert prefixes.matched_blocks(text_chain(asked)) == expected


@given(st.lists(texts, max_size=40), st.integers(1, 30))
def test_memory_is_bounded_and_the_newest_is_known(recorded: list[str], limit: int) -> None:
    prefixes = RecentPrefixes(limit)
    for text in recorded:
        chain = text_chain(text)
        prefixes.record(chain, 100)
        assert len(prefixes) <= max(limit, 2)
        assert prefixes.matched_blocks(chain) >= min(len(chain.hashes), max(1, limit // 2))


def test_prefixes_are_forgotten_at_the_engines_capacity() -> None:
    prefixes = RecentPrefixes(10_000, capacity_tokens=1_000)
    first = text_chain("a" * BLOCK)
    prefixes.record(first, 400)
    assert prefixes.matched_blocks(first) == 1
    for other in "bcdefg":
        prefixes.record(text_chain(other * BLOCK), 400)
    assert prefixes.matched_blocks(first) == 0


def test_a_repeated_prompt_takes_no_room() -> None:
    prefixes = RecentPrefixes(10_000, capacity_tokens=1_000)
    first, same = text_chain("a" * BLOCK), text_chain("b" * BLOCK)
    prefixes.record(first, 400)
    for _ in range(100):
        prefixes.record(same, 50)
    assert prefixes.matched_blocks(first) == 1


def test_each_engine_has_its_own_prefixes() -> None:
    """ray#58835: a prefix tree shared over deployments raises for a name it does not know."""
    index = PrefixIndex()
    index.follow("fp16", 1)
    index.follow("gptq", 1)
    chain = text_chain("x" * BLOCK * 4)
    index.record(chain, 400, "fp16")
    index.record(chain, 400, "gone")
    assert index.cached_tokens(chain, 400) == {"fp16": 399}
    index.forget("never there")
    index.forget("fp16")
    assert index.cached_tokens(chain, 400) == {}


def test_a_restarted_engine_starts_empty() -> None:
    index = PrefixIndex()
    index.follow("fp16", 1)
    chain = text_chain("x" * BLOCK * 4)
    index.record(chain, 400, "fp16")
    index.follow("fp16", 1)
    assert index.cached_tokens(chain, 400)
    index.follow("fp16", 2)
    assert index.cached_tokens(chain, 400) == {}
    assert index.seen_tokens(chain, 400) == 399


def test_a_mode_without_reuse_leaves_a_prefix_seen_but_not_cached() -> None:
    index = PrefixIndex()
    index.follow("fp16", 1)
    chain = text_chain("x" * BLOCK * 2 + "tail")
    index.record(chain, 200, None)
    assert index.cached_tokens(chain, 200) == {}
    assert 190 < index.seen_tokens(chain, 200) < 200


def test_expected_tokens_follow_the_matched_share() -> None:
    index = PrefixIndex()
    index.follow("e", 1)
    index.record(text_chain("s" * BLOCK * 3), 300, "e")
    asked = text_chain("s" * BLOCK * 3 + "t" * BLOCK)
    assert index.cached_tokens(asked, 1000) == {"e": 750}


def test_salts_and_kinds_share_nothing() -> None:
    text = "x" * BLOCK * 2
    assert not set(text_chain(text).hashes) & set(text_chain(text, "tenant").hashes)
    tokens = list(range(3 * TOKENS_PER_BLOCK + 5))
    chain = token_chain(tokens)
    assert len(chain.hashes) == 3
    assert chain.total == len(tokens)
    assert token_chain(tokens[:-5]).hashes == chain.hashes
    assert not set(chain.hashes) & set(token_chain(tokens, "tenant").hashes)


@pytest.mark.parametrize("text", ["", "short"])
def test_a_text_below_a_block_is_no_prefix(text: str) -> None:
    index = PrefixIndex()
    index.follow("e", 1)
    chain = text_chain(text)
    index.record(chain, 3, "e")
    assert index.cached_tokens(chain, 3) == {}
    assert index.seen_tokens(chain, 3) == 0


def test_a_huge_prompt_has_few_blocks_and_still_matches_a_shorter_one() -> None:
    long, short = text_chain("y" * 5_000_000), text_chain("y" * 1_000_000)
    assert len(long.hashes) <= 640
    assert long.hashes[: len(short.hashes)] == short.hashes
    assert short.covered(len(short.hashes)) > 0.98 * 1_000_000
