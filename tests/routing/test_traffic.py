import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.tags import Tag
from app.routing.traffic import Traffic

sizes_and_tags = st.tuples(st.integers(0, 10_000), st.integers(1, 10_000), st.sampled_from(Tag))
requests = st.lists(sizes_and_tags, min_size=1, max_size=100)


@given(requests)
def test_the_means_stay_within_what_came(sizes: list[tuple[int, int, Tag]]) -> None:
    traffic = Traffic()
    for prompt, output, tag in sizes:
        traffic.add(prompt, prompt // 2, output, tag, 0.0)
    assert min(p for p, _, _ in sizes) - 1e-6 <= traffic.prompt_tokens <= max(p for p, _, _ in sizes) + 1e-6
    assert min(o for _, o, _ in sizes) - 1e-6 <= traffic.output_tokens <= max(o for _, o, _ in sizes) + 1e-6


@given(requests)
def test_the_shares_are_of_the_tags_that_came_and_make_a_whole(sizes: list[tuple[int, int, Tag]]) -> None:
    traffic = Traffic()
    assert traffic.output_shares == {}
    for prompt, output, tag in sizes:
        traffic.add(prompt, prompt // 2, output, tag, 0.0)
    assert traffic.output_shares.keys() == {tag.value for _, _, tag in sizes}
    assert sum(traffic.output_shares.values()) == pytest.approx(1.0)


def test_a_share_is_of_tokens_and_fades_with_the_requests() -> None:
    traffic = Traffic()
    traffic.add(10, 0, 30, Tag.REWRITING, 0.0)
    before = traffic.output_shares
    traffic.add(10, 0, 10, Tag.NONE, 0.0)
    assert traffic.output_shares == pytest.approx({"rewriting": 0.75, "none": 0.25})
    assert before == {"rewriting": 1.0}, "a snapshot that holds it stays as it was"
    for _ in range(200):
        traffic.add(10, 0, 10, Tag.CODE, 0.0)
    assert traffic.output_shares["code"] == pytest.approx(1.0, abs=0.01)


def test_the_first_requests_count_alike_and_later_ones_replace_them() -> None:
    traffic = Traffic()
    for prompt in (100, 200, 300):
        traffic.add(prompt, prompt // 10, 10, Tag.NONE, 0.0)
    assert (traffic.prompt_tokens, traffic.seen_tokens) == (200, 20)
    for _ in range(200):
        traffic.add(50, 50, 10, Tag.NONE, 0.0)
    assert abs(traffic.prompt_tokens - 50) < 1
    assert abs(traffic.seen_tokens - 50) < 1


def test_the_rate_follows_the_arrivals_and_fades_without_them() -> None:
    traffic = Traffic()
    assert traffic.arrivals_per_s(5.0) == 0.0
    for place in range(300):
        traffic.add(10, 0, 10, Tag.NONE, 1000.0 + 2.0 * place)
    last_s = 1000.0 + 2.0 * 299
    assert traffic.arrivals_per_s(last_s) == pytest.approx(0.5, rel=0.05)
    assert traffic.arrivals_per_s(last_s + 60.0) < 0.4 * traffic.arrivals_per_s(last_s)
    assert traffic.arrivals_per_s(last_s + 3600.0) < 1e-9
    assert traffic.arrivals_per_s(last_s - 10.0) == traffic.arrivals_per_s(last_s), "a clock that jumps back"
