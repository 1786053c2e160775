import heapq

from hypothesis import given
from hypothesis import strategies as st

from app.routing import fairness
from app.routing.fairness import FairShares, Reservation, weighted_tokens


def test_a_heavy_tenant_is_slowed_and_a_light_one_is_not() -> None:
    """litellm#17664, #18128: prompt tokens count, and a heavy user gets less rather than errors."""
    shares = FairShares()
    shares.reserve("light", 100, 10)
    heavy = [shares.reserve("heavy", 4000, 10) for _ in range(20)]
    light = shares.reserve("light", 100, 10)
    assert heavy[-1].priority > light.priority
    assert light.priority == 0
    assert [r.priority for r in heavy] == sorted(r.priority for r in heavy)


def test_idling_saves_no_credit() -> None:
    shares = FairShares()
    for _ in range(10):
        shares.settle(shares.reserve("old", 1000, 100), 1000, 100)
    busy = shares.reserve("busy", 1000, 100)
    for _ in range(50):
        shares.reserve("busy", 1000, 100)
    late = shares.reserve("late", 10, 1)
    assert late.priority >= busy.priority
    counters = shares.counters()
    assert counters["late"] >= counters["busy"] - weighted_tokens(10, 1) or late.priority > busy.priority


def test_when_all_were_idle_the_next_starts_where_the_last_left() -> None:
    shares = FairShares()
    shares.settle(shares.reserve("one", 10_000, 100), 10_000, 100)
    first = shares.reserve("two", 1, 1)
    again = shares.reserve("one", 1, 1)
    assert first.priority == again.priority


def test_a_reservation_is_settled_to_what_was_used() -> None:
    shares = FairShares()
    reservation = shares.reserve("a", 100, 1000)
    shares.settle(reservation, 100, 50)
    assert shares.counters()["a"] == weighted_tokens(100, 50)
    shares.settle(shares.reserve("a", 100, 1000), 0, 0)
    assert shares.counters()["a"] == weighted_tokens(100, 50)


def test_a_share_of_two_has_twice_the_tokens() -> None:
    shares = FairShares()
    # Both begin before anything is charged, so that neither is lifted.
    shares.reserve("double", 0, 0, share=2.0)
    shares.reserve("single", 0, 0)
    for _ in range(10):
        shares.reserve("double", 1000, 0, share=2.0)
        shares.reserve("single", 1000, 0)
    counters = shares.counters()
    assert counters["double"] * 2 == counters["single"]


def test_a_share_that_changes_meanwhile_gives_nothing_back_that_was_not_charged() -> None:
    shares = FairShares()
    first = shares.reserve("a", 1000, 0, share=10.0)
    second = shares.reserve("a", 1000, 0, share=1.0)
    shares.settle(first, 0, 0)
    assert shares.counters()["a"] == weighted_tokens(1000, 0)
    shares.settle(second, 0, 0)
    assert shares.counters()["a"] == 0


def test_tenants_are_bounded() -> None:
    shares = FairShares()
    for number in range(fairness.MAX_IDLE_TENANTS + 500):
        shares.settle(shares.reserve(f"tenant {number}", 10, 1), 10, 1)
    assert len(shares.counters()) <= fairness.MAX_IDLE_TENANTS + 1


def test_a_heavy_request_still_finishes_within_a_bound() -> None:
    """vllm#41951: a request passed over again and again still finishes.

    One slot, always the lowest priority first (what a preempting scheduler amounts to). A light tenant always has a
    request waiting; the heavy tenant's request may be overtaken only until the light one's counter has passed it.
    """
    shares = FairShares()
    order = 0
    waiting: list[tuple[int, int, Reservation]] = []

    def arrive(tenant: str, tokens: int) -> None:
        nonlocal order
        reservation = shares.reserve(tenant, tokens, 10)
        heapq.heappush(waiting, (reservation.priority, order, reservation))
        order += 1

    arrive("light", 100)
    for _ in range(20):
        arrive("heavy", 2000)
    served_light = 0
    finished_heavy = 0
    while finished_heavy < 20:
        _, _, reservation = heapq.heappop(waiting)
        shares.settle(reservation, 100 if reservation.tenant == "light" else 2000, 10)
        if reservation.tenant == "light":
            served_light += 1
            arrive("light", 100)
        else:
            finished_heavy += 1
        assert served_light * weighted_tokens(100, 10) <= 21 * weighted_tokens(2000, 10)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5000), st.integers(0, 500), st.booleans()), max_size=60)
)
def test_counters_stay_sound(steps: list[tuple[str, int, int, bool]]) -> None:
    shares = FairShares()
    open_: list[Reservation] = []
    for tenant, prompt_tokens, output_tokens, settle in steps:
        if settle and open_:
            shares.settle(open_.pop(0), prompt_tokens, output_tokens)
        reservation = shares.reserve(tenant, prompt_tokens, output_tokens)
        assert reservation.priority >= 0
        open_.append(reservation)
    for reservation in open_:
        shares.settle(reservation, 0, 0)
    assert all(counter >= 0 for counter in shares.counters().values())
