import pytest

from app.routing.profile import GateOutcome
from loadgen.quality_gate import (
    ACCURACY,
    KL,
    Divergence,
    Limits,
    PairedAnswer,
    accuracy_evidence,
    evidence,
    kl_evidence,
    paired_difference,
    settle,
    wilson_low,
)


def answers(both: int, lost: int = 0, gained: int = 0, neither: int = 0, chance: float = 0.25) -> list[PairedAnswer]:
    return [
        *[PairedAnswer(True, True, chance)] * both,
        *[PairedAnswer(True, False, chance)] * lost,
        *[PairedAnswer(False, True, chance)] * gained,
        *[PairedAnswer(False, False, chance)] * neither,
    ]


def test_interval_of_pairs_without_a_difference_is_as_wide_as_their_number_allows() -> None:
    z = 1.959964
    for total in (10, 100, 1000):
        estimate, low, high = paired_difference(0, 0, total)
        assert estimate == 0
        assert (low, high) == pytest.approx((-z * z / (total + z * z), z * z / (total + z * z)), abs=1e-9)


def test_interval_mirrors_when_gained_and_lost_change_places() -> None:
    estimate, low, high = paired_difference(9, 2, 50)
    assert estimate == pytest.approx(0.14)
    assert 0 < low < estimate < high
    mirrored = paired_difference(2, 9, 50)
    assert (mirrored[1], mirrored[2]) == pytest.approx((-high, -low), abs=1e-9)


def test_score_at_the_ends_of_the_interval_is_z() -> None:
    gained, lost, total = 9, 2, 50
    for delta in paired_difference(gained, lost, total)[1:]:
        b = -gained - lost + (2 * total - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        share = ((b * b - 8 * total * c) ** 0.5 - b) / (4 * total)
        score = (gained - lost - total * delta) / (total * (2 * share + delta * (1 - delta))) ** 0.5
        assert abs(score) == pytest.approx(1.959964, rel=1e-6)


def test_one_question_and_all_lost() -> None:
    assert paired_difference(0, 1, 1)[1] == -1.0
    estimate, low, high = paired_difference(0, 5, 5)
    assert (estimate, low) == (-1.0, -1.0)
    assert high < 0


@pytest.mark.parametrize(
    "pairs, outcome",
    [
        (answers(both=400), GateOutcome.PASS),
        (answers(both=100), GateOutcome.INSUFFICIENT),  # 100 pairs cannot resolve 1.5 points
        (answers(both=300, lost=100), GateOutcome.FAIL),
        (answers(both=25, neither=75), GateOutcome.NO_SIGNAL),  # the reference guesses
        (answers(both=1000, lost=20, gained=20), GateOutcome.PASS),
        ([], GateOutcome.INSUFFICIENT),
    ],
)
def test_accuracy(pairs: list[PairedAnswer], outcome: GateOutcome) -> None:
    found = accuracy_evidence("gptq", "mathematics", pairs)
    assert found.outcome is outcome
    assert found.metric == ACCURACY
    assert found.samples == len(pairs)


def test_lost_answers_are_negative_points() -> None:
    found = accuracy_evidence("gptq", "any", answers(both=90, lost=10))
    assert found.delta == pytest.approx(-10)
    assert found.low is not None
    assert found.high is not None
    assert found.low < -10 < found.high < 0


def texts(kl_nats: float, count: int = 30, covered: float = 0.95) -> list[Divergence]:
    return [Divergence(kl_nats * (0.9 + 0.2 * (index % 2)), covered) for index in range(count)]


@pytest.mark.parametrize(
    "found, outcome",
    [
        (texts(0.01), GateOutcome.PASS),
        (texts(0.3), GateOutcome.FAIL),
        (texts(0.05), GateOutcome.INSUFFICIENT),
        (texts(0.01, count=5), GateOutcome.INSUFFICIENT),
        (texts(0.01, covered=0.5), GateOutcome.INSUFFICIENT),
        # What was not compared can only add to it.
        (texts(0.3, covered=0.5), GateOutcome.FAIL),
        (texts(0.3, count=5, covered=0.5), GateOutcome.INSUFFICIENT),
        (texts(0.01, count=1), GateOutcome.INSUFFICIENT),
        ([], GateOutcome.INSUFFICIENT),
    ],
)
def test_kl(found: list[Divergence], outcome: GateOutcome) -> None:
    judged = kl_evidence("gptq", "none", found)
    assert judged.outcome is outcome
    assert judged.covered == (pytest.approx(found[0].covered) if found else None)
    judged.model_dump_json()


def test_stated_bounds_count() -> None:
    assert kl_evidence("gptq", "none", texts(0.3), Limits(kl_max_nats=0.5)).outcome is GateOutcome.PASS
    pairs = answers(both=300, lost=100)
    assert accuracy_evidence("gptq", "any", pairs, Limits(accuracy_drop_max_points=40)).outcome is GateOutcome.PASS


def test_right_answers_decide_where_they_can_and_kl_where_they_cannot() -> None:
    assert evidence("m", "s", answers(both=400), texts(0.3)).metric == ACCURACY
    assert evidence("m", "s", answers(both=300, lost=100), texts(0.01)).outcome is GateOutcome.FAIL
    small = evidence("m", "s", answers(both=25, neither=75), texts(0.01))
    assert (small.metric, small.outcome) == (KL, GateOutcome.PASS)
    assert evidence("m", "s", answers(both=100), texts(0.3)).outcome is GateOutcome.FAIL
    assert evidence("m", "s", answers(both=25, neither=75), texts(0.01, count=3)).outcome is GateOutcome.NO_SIGNAL
    assert evidence("m", "s", [], texts(0.01)).metric == KL


def test_nothing_to_settle_is_an_error() -> None:
    with pytest.raises(ValueError, match="no evidence"):
        settle([])


def test_wilson() -> None:
    assert wilson_low(0, 10) == pytest.approx(0, abs=1e-12)
    assert wilson_low(50, 100) == pytest.approx(0.4038, abs=1e-4)
