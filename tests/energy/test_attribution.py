"""Joules are conserved whatever the reports say, and go where the work was."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.energy.activity import Slice, Work
from app.energy.attribution import Basis, Placed, PowerEstimate, TokenWeights, Window, settle, share_idle

WEIGHTS = TokenWeights(0.1, 1.0)
WINDOW = Window(10.0, 11.0, 100.0)

requests = st.sampled_from(["r1", "r2", "r3"])
work = st.builds(Work, requests, st.integers(0, 5000), st.integers(0, 300))


@st.composite
def placed(draw):
    start_s = draw(st.floats(9, 11.5))
    length_s = draw(st.floats(0, 1.5))
    busy_s = draw(st.none() | st.floats(0, 1).map(lambda part: part * length_s))
    piece = Slice(start_s, start_s + length_s, busy_s, tuple(draw(st.lists(work, max_size=4))))
    return Placed(draw(st.sampled_from(["A", "B", "C"])), piece)


watts = st.none() | st.builds(
    PowerEstimate,
    st.dictionaries(st.sampled_from(["A", "B", "C"]), st.floats(0, 500)),
    st.frozensets(st.sampled_from(["A", "B", "C"])),
)
token_weights = st.dictionaries(
    st.sampled_from(["A", "B", "C"]), st.builds(TokenWeights, st.floats(0.001, 9), st.floats(0.001, 9))
)
cpu = st.none() | st.dictionaries(st.sampled_from(["A", "B", "C"]), st.floats(0, 8))


@given(st.lists(placed(), max_size=12), st.none() | st.floats(0, 300), st.floats(0, 1000), watts, cpu, token_weights)
def test_measured_is_idle_and_credited_and_residual(pieces, idle_w, measured_j, power, cpu_s, measured):
    settlement = settle(Window(10, 11, measured_j), pieces, idle_w, WEIGHTS, power, cpu_s, measured)
    explained_j = (settlement.idle_j or 0.0) + settlement.credited_j + settlement.residual_j
    assert explained_j == pytest.approx(measured_j, abs=1e-6)
    assert all(credit.energy_j >= 0 for credit in settlement.credits)
    active = {credit.engine for credit in settlement.credits}
    assert active == {item.engine for item in pieces if overlaps(item.slice)}


def overlaps(piece):
    if piece.end_s <= piece.start_s:
        return 10 <= piece.start_s < 11
    return min(piece.end_s, 11) > max(piece.start_s, 10)


@given(st.lists(placed(), min_size=1, max_size=12), st.lists(st.floats(9, 13), max_size=6))
def test_tokens_are_counted_once_however_time_is_cut(pieces, cuts):
    borders = [0.0, *sorted(set(cuts)), 20.0]
    decode = prefill = 0.0
    for start_s, end_s in pairwise(borders):
        for credit in settle(Window(start_s, end_s, 50), pieces, 10, WEIGHTS).credits:
            decode += credit.decode_tokens
            prefill += credit.prefill_tokens
    assert decode == pytest.approx(sum(w.decode_tokens for p in pieces for w in p.slice.work))
    assert prefill == pytest.approx(sum(w.prefill_tokens for p in pieces for w in p.slice.work))


def busy(engine, busy_s, *works, start_s=10.0, end_s=11.0):
    return Placed(engine, Slice(start_s, end_s, busy_s, tuple(works)))


def by_engine(settlement):
    joules = {}
    for credit in settlement.credits:
        joules[credit.engine] = joules.get(credit.engine, 0.0) + credit.energy_j
    return joules


def test_one_engine_gets_all_above_idle():
    settlement = settle(WINDOW, [busy("A", 0.3, Work("r1", 0, 1))], 40, WEIGHTS)
    assert by_engine(settlement) == {"A": pytest.approx(60)}
    assert settlement.basis is Basis.ALONE


def test_two_engines_share_by_busy_time_and_power():
    pieces = [busy("A", 0.5, Work("r1", 0, 1)), busy("B", 1.0, Work("r2", 0, 1))]
    power = PowerEstimate({"A": 200, "B": 100}, frozenset("AB"))
    settlement = settle(WINDOW, pieces, 40, WEIGHTS, power)
    assert by_engine(settlement) == {"A": pytest.approx(30), "B": pytest.approx(30)}
    assert settlement.basis is Basis.BUSY_POWER


def test_cpu_time_of_processes_comes_first():
    pieces = [busy("A", 1.0, Work("r1", 0, 1)), busy("B", 1.0, Work("r2", 0, 1))]
    settlement = settle(WINDOW, pieces, 40, WEIGHTS, None, {"A": 3.0, "B": 1.0})
    assert by_engine(settlement) == {"A": pytest.approx(45), "B": pytest.approx(15)}
    assert settlement.basis is Basis.PROCESS_CPU


def test_without_busy_time_tokens_decide_and_it_is_flagged():
    pieces = [busy("A", None, Work("r1", 100, 20)), busy("B", 1.0, Work("r2", 0, 10))]
    settlement = settle(WINDOW, pieces, 40, WEIGHTS)
    assert by_engine(settlement) == {"A": pytest.approx(45), "B": pytest.approx(15)}
    assert settlement.basis is Basis.TOKEN_SHARE


def test_requests_share_their_slices_by_weighted_tokens():
    first = busy("A", 0.4, Work("r1", 100, 0), Work("r2", 0, 10), end_s=10.5)
    second = busy("A", 0.2, Work("r2", 0, 1), start_s=10.5)
    settlement = settle(WINDOW, [first, second], 40, WEIGHTS)
    assert {credit.request_id: credit.energy_j for credit in settlement.credits} == {
        "r1": pytest.approx(20),
        "r2": pytest.approx(40),
    }


def test_an_engine_that_was_measured_has_weights_of_its_own():
    pieces = [
        busy(engine, 0.5, Work(f"{engine}1", 100, 0), Work(f"{engine}2", 0, 10), start_s=start_s, end_s=start_s + 0.5)
        for engine, start_s in (("A", 10.0), ("B", 10.5))
    ]
    settlement = settle(WINDOW, pieces, 40, WEIGHTS, measured={"A": TokenWeights(0.02, 0.2 / 3)})
    assert {credit.request_id: credit.energy_j for credit in settlement.credits} == {
        "A1": pytest.approx(30 * 3 / 4),
        "A2": pytest.approx(30 / 4),
        "B1": pytest.approx(15),
        "B2": pytest.approx(15),
    }


def test_measured_joules_split_engines_only_where_all_were_measured():
    pieces = [busy("A", None, Work("r1", 0, 10)), busy("B", None, Work("r2", 0, 10))]
    measured = {"A": TokenWeights(0.01, 0.2), "B": TokenWeights(0.01, 0.1)}
    assert by_engine(settle(WINDOW, pieces, 40, WEIGHTS, measured=measured)) == {
        "A": pytest.approx(40),
        "B": pytest.approx(20),
    }
    del measured["B"]
    assert by_engine(settle(WINDOW, pieces, 40, WEIGHTS, measured=measured)) == {
        "A": pytest.approx(30),
        "B": pytest.approx(30),
    }


def test_an_engines_own_work_is_nobodys_request():
    (credit,) = settle(WINDOW, [busy("A", 1.0)], 40, WEIGHTS).credits
    assert (credit.request_id, credit.energy_j) == (None, pytest.approx(60))


def test_nobody_active_means_residual():
    settlement = settle(WINDOW, [], 40, WEIGHTS)
    assert (settlement.idle_j, settlement.residual_j) == (pytest.approx(40), pytest.approx(60))


def test_less_than_idle_is_a_negative_residual_and_no_negative_credit():
    settlement = settle(WINDOW, [busy("A", 1.0, Work("r1", 0, 1))], 120, WEIGHTS)
    assert (settlement.credited_j, settlement.residual_j) == (0.0, pytest.approx(-20))


def test_without_a_baseline_idle_is_unknown_and_not_0():
    settlement = settle(WINDOW, [busy("A", 1.0, Work("r1", 0, 1))], None, WEIGHTS)
    assert settlement.idle_j is None
    assert settlement.credited_j == pytest.approx(100)


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers(0, 10**11), min_size=1), st.floats(0, 1e6))
def test_shared_idle_sums_to_idle(resident_bytes, idle_j):
    shares = share_idle(idle_j, resident_bytes)
    assert shares.keys() == resident_bytes.keys()
    assert sum(shares.values()) == pytest.approx(idle_j)


def test_idle_is_shared_by_memory_or_equally():
    assert share_idle(90, {"A": 2, "B": 1}) == {"A": 60, "B": 30}
    assert share_idle(90, {"A": 2, "B": None}) == {"A": 45, "B": 45}
    assert share_idle(90, {}) == {}
