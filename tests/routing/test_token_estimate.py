from hypothesis import given
from hypothesis import strategies as st

from app.routing.token_estimate import TokenEstimator


def test_learns_the_tokenizers_ratio_by_kind_of_text() -> None:
    estimator = TokenEstimator()
    assert estimator.estimate("a" * 400) == 100
    for _ in range(200):
        estimator.observe("a" * 300, 100)
        estimator.observe("字" * 80, 100)
    assert estimator.estimate("a" * 900) == 300
    assert estimator.estimate("字" * 80) == 100


@given(st.lists(st.tuples(st.text(max_size=50), st.integers(-5, 10_000))), st.text(max_size=50))
def test_estimates_stay_possible(seen: list[tuple[str, int]], text: str) -> None:
    estimator = TokenEstimator()
    for known, tokens in seen:
        estimator.observe(known, tokens)
    estimate = estimator.estimate(text)
    assert (estimate >= 1) == bool(text)
    assert estimate <= 4 * len(text)
