import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.token_budget import TokenBudget


def test_reserve_and_settle() -> None:
    budget = TokenBudget(10.0, 100.0, now_s=0.0)
    assert budget.reserve(80, 0.0) == 0.0
    assert budget.reserve(60, 0.0) == pytest.approx(4.0)
    budget.settle(80, 20, 0.0)
    assert budget.reserve(60, 0.0) == 0.0
    assert budget.available_tokens(2.0) == pytest.approx(40.0)


def test_an_overrun_is_owed() -> None:
    budget = TokenBudget(10.0, 100.0, now_s=0.0)
    budget.reserve(100, 0.0)
    budget.settle(100, 150, 0.0)
    assert budget.available_tokens(0.0) == -50.0
    assert budget.reserve(1, 0.0) == pytest.approx(5.1)


def test_a_request_above_the_bucket_waits_for_a_full_one() -> None:
    budget = TokenBudget(10.0, 100.0, now_s=0.0)
    assert budget.reserve(500, 0.0) == 0.0
    assert budget.reserve(500, 0.0) == pytest.approx(50.0)


def test_a_clock_that_jumps_is_harmless() -> None:
    budget = TokenBudget(10.0, 100.0, now_s=1e9)
    budget.reserve(100, 1e9)
    assert budget.available_tokens(0.0) == 0.0
    assert budget.available_tokens(1.0) == pytest.approx(10.0)
    assert budget.available_tokens(1e12) == 100.0


@pytest.mark.parametrize("figures", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_impossible_budgets_are_refused(figures: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBudget(*figures, now_s=0.0)


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 5)), max_size=40))
def test_over_any_time_no_more_than_burst_and_refill_is_granted(steps: list[tuple[int, float]]) -> None:
    budget = TokenBudget(10.0, 200.0, now_s=0.0)
    now_s = 0.0
    granted = 0
    for tokens, passed_s in steps:
        now_s += passed_s
        if budget.reserve(tokens, now_s) == 0.0:
            granted += tokens
        assert granted <= 200 + 10 * now_s + 1e-6
