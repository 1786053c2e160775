from hypothesis import given
from hypothesis import strategies as st

from app.routing.traffic import Traffic

requests = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)), min_size=1, max_size=100)


@given(requests)
def test_the_means_stay_within_what_came(sizes: list[tuple[int, int]]) -> None:
    traffic = Traffic()
    for prompt, output in sizes:
        traffic.add(prompt, output)
    assert min(p for p, _ in sizes) - 1e-6 <= traffic.prompt_tokens <= max(p for p, _ in sizes) + 1e-6
    assert min(o for _, o in sizes) - 1e-6 <= traffic.output_tokens <= max(o for _, o in sizes) + 1e-6


def test_the_first_requests_count_alike_and_later_ones_replace_them() -> None:
    traffic = Traffic()
    for prompt in (100, 200, 300):
        traffic.add(prompt, 10)
    assert traffic.prompt_tokens == 200
    for _ in range(200):
        traffic.add(50, 10)
    assert abs(traffic.prompt_tokens - 50) < 1
