import numpy as np
import pytest

from loadgen.report.load_figures import _in_flight, _power_w
from loadgen.report.material import Estimate, Served
from loadgen.report.policy_figures import _rests_on


def test_an_estimate_the_other_way_round_swaps_its_ends() -> None:
    assert Estimate(0.5, 0.4, 0.8, 7).inverse == Estimate(2.0, 1.25, 2.5, 7)
    assert Estimate(0.5).inverse == Estimate(2.0)
    assert Estimate(2.0, 1.5, 2.25).errors == (0.5, 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_figure_that_is_none_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Estimate.read({"estimate": value, "low": None, "high": None, "pairs": 1})


def test_infinite_ends_are_unknown() -> None:
    assert Estimate.read({"estimate": 1, "low": float("-inf"), "high": float("inf"), "pairs": 1}) == Estimate(
        1.0, None, None, 1
    )


def test_power_and_load_in_time() -> None:
    requests = [
        Served(0.0, 2.0, "a", 8.0),
        Served(1.0, 3.0, "a", 2.0),
        Served(1.5, 1.5, "a", 9.0),
        Served(0, 9, "b", None),
    ]
    times_s = np.asarray([0.5, 1.25, 2.5, 3.5])
    assert _power_w(requests, times_s) == pytest.approx([4.0, 5.0, 1.0, 0.0])
    assert _in_flight(requests[:2], times_s) == pytest.approx([1, 2, 1, 0])
    assert _power_w([], times_s) == pytest.approx([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([Estimate(2.0, n=1), None], "One measurement each: no interval"),
        ([Estimate(2.0)], "the results have none"),
        ([None], "the results have none"),
        ([Estimate(2.0, 1.0, 3.0, 9), Estimate(1.0, n=1), Estimate(2.0, 1.0, 3.0, 12)], "n = 9 to 12 prompt groups"),
    ],
)
def test_a_caption_says_what_its_intervals_are_of(values: list[Estimate | None], words: str) -> None:
    assert words in _rests_on(values, "prompt groups")
