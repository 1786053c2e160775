from hypothesis import given
from hypothesis import strategies as st

from app.routing.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breakers, BreakerState, CircuitBreaker


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now_s)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert opened().state(0.0) is BreakerState.OPEN
    assert opened().retry_in_s(4.0) == FIRST_PAUSE_S - 4.0


def test_one_probe_at_a_time_after_the_pause() -> None:
    breaker = opened()
    assert not breaker.admits(FIRST_PAUSE_S - 0.1)
    assert breaker.admits(FIRST_PAUSE_S)
    breaker.started(FIRST_PAUSE_S)
    assert not breaker.admits(FIRST_PAUSE_S + 1)
    breaker.succeeded()
    assert breaker.admits(FIRST_PAUSE_S + 1)
    assert breaker.retry_in_s(FIRST_PAUSE_S + 1) is None


def test_a_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker = opened()
    now_s, pauses = 0.0, []
    for _ in range(8):
        pause_s = breaker.retry_in_s(now_s)
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += pause_s
        breaker.started(now_s)
        breaker.failed(now_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_probe_that_never_reports_is_given_up() -> None:
    breaker = opened()
    breaker.started(FIRST_PAUSE_S)
    assert not breaker.admits(FIRST_PAUSE_S + 60)
    assert breaker.admits(FIRST_PAUSE_S + 121)


def test_a_clock_that_jumps_back_does_not_lock_it() -> None:
    breaker = opened(1e9)
    assert not breaker.admits(0.0)
    assert breaker.admits(FIRST_PAUSE_S)


def test_breakers_name_the_tripped_modes() -> None:
    breakers = Breakers(["fp16", "gptq"])
    for _ in range(FAILURES_TO_OPEN):
        breakers["gptq"].failed(0.0)
    assert breakers.tripped(1.0) == {"gptq"}
    assert breakers.tripped(FIRST_PAUSE_S) == frozenset()


@given(st.lists(st.tuples(st.sampled_from(["fail", "ok", "start"]), st.floats(0, 1000)), max_size=40))
def test_it_always_opens_to_a_request_again(events: list[tuple[str, float]]) -> None:
    breaker = CircuitBreaker()
    now_s = 0.0
    for event, passed_s in events:
        now_s += passed_s
        if event == "fail":
            breaker.failed(now_s)
        elif event == "ok":
            breaker.succeeded()
        elif breaker.admits(now_s):
            breaker.started(now_s)
    assert breaker.admits(now_s + LONGEST_PAUSE_S)


def test_a_probe_without_a_verdict_leaves_its_place_to_the_next() -> None:
    breaker = opened()
    breaker.started(FIRST_PAUSE_S)
    breaker.released(FIRST_PAUSE_S - 5)
    breaker.released(None)
    assert not breaker.admits(FIRST_PAUSE_S + 1)
    breaker.released(FIRST_PAUSE_S)
    assert breaker.state(FIRST_PAUSE_S + 1) is BreakerState.HALF_OPEN
    assert breaker.admits(FIRST_PAUSE_S + 1)
