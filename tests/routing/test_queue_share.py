from hypothesis import given
from hypothesis import strategies as st

from app.routing.queue_share import has_its_share

shares = st.floats(0.1, 4.0)


def fill(held: dict[str, int], places: int, tenant: str, share: float) -> None:
    """The tenant takes as much as it gets."""
    while (free := places - sum(held.values())) > 0 and not has_its_share(held.get(tenant, 0), free, share):
        held[tenant] = held.get(tenant, 0) + 1


@given(st.integers(0, 1000), shares)
def test_who_holds_nothing_is_never_kept_out(free: int, share: float) -> None:
    assert not has_its_share(0, free, share)


@given(st.integers(1, 1000), st.integers(0, 1000), shares)
def test_who_is_kept_out_stays_so_with_more_places_or_fewer_free_ones(held: int, free: int, share: float) -> None:
    if has_its_share(held, free, share):
        assert has_its_share(held + 1, free, share)
        assert has_its_share(held, max(0, free - 1), share)
        assert has_its_share(held, free, share / 2)


@given(st.integers(2, 2000), shares)
def test_alone_a_tenant_fills_its_share_against_one_newcomer(places: int, share: float) -> None:
    held: dict[str, int] = {}
    fill(held, places, "heavy", share)
    assert abs(held["heavy"] - places * share / (1 + share)) <= 1
    if share <= 1:
        assert held["heavy"] < places


@given(st.integers(4, 2000))
def test_two_that_want_all_are_equal_once_the_first_has_given_way(places: int) -> None:
    held: dict[str, int] = {}
    fill(held, places, "first", 1.0)
    for _ in range(3 * places):
        # The first one's requests end and come again; the other's wait for a place.
        held["first"] -= 1
        fill(held, places, "second", 1.0)
        fill(held, places, "first", 1.0)
    assert abs(held["first"] - held["second"]) <= 1
    assert abs(held["first"] - places / 3) <= 1


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=400),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.5, 2.0)),
)
def test_however_four_tenants_come_and_go_a_fifth_finds_a_place(
    events: list[tuple[str, bool]], weights: dict[str, float]
) -> None:
    held: dict[str, int] = {}
    for tenant, greedy in events:
        if greedy:
            fill(held, 256, tenant, weights.get(tenant, 1.0))
        elif held.get(tenant):
            held[tenant] -= 1
        assert sum(held.values()) < 256
