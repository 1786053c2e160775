import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadgen.sse import DONE, SseParser

STREAM = b': hello\n\nevent: x\ndata: {"a": 1}\r\n\r\ndata: two\ndata: lines\n\ndata:tight\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b"two\nlines", b"tight", DONE]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_payloads_do_not_depend_on_where_the_network_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    got = [payload for start, end in itertools.pairwise(edges) for payload in parser.feed(STREAM[start:end])]
    assert got == PAYLOADS
    assert not parser.pending


def test_a_cut_event_is_pending() -> None:
    parser = SseParser()
    assert parser.feed(b"data: half") == []
    assert parser.pending
