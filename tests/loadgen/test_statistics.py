import math

import numpy as np
import pytest

from loadgen.statistics import difference_of_pairs, grouped_bootstrap, paired_bootstrap, percentile, summarise


def test_summary_of_a_known_sample() -> None:
    summary = summarise([float(value) for value in range(1, 102)])
    assert summary is not None
    assert (summary.n, summary.mean, summary.p50, summary.p95, summary.largest) == (101, 51, 51, 96, 101)
    assert summarise([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_drift_that_both_halves_share_cancels() -> None:
    drift = np.linspace(1, 3, 12)
    found = paired_bootstrap(list(0.9 * drift), list(drift))
    assert found.estimate == pytest.approx(0.9)
    assert found.low == pytest.approx(0.9)
    assert found.high == pytest.approx(0.9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        left, right = rng.lognormal(0.2, 0.1, 20), rng.lognormal(0.0, 0.1, 20)
        found = paired_bootstrap(list(left), list(right), seed=trial, resamples=500)
        inside += found.low <= math.exp(0.2) <= found.high
    assert 170 <= inside <= 199


def test_a_difference_is_in_the_unit_of_the_sample() -> None:
    found = paired_bootstrap([110.0, 120.0, 131.0], [100.0, 110.0, 120.0], difference_of_pairs)
    assert found.estimate == 10.0
    assert found.low <= 10.0 <= found.high


def test_one_pair_has_no_spread() -> None:
    found = paired_bootstrap([2.0], [1.0])
    assert (found.estimate, found.low, found.high) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_pairs_that_make_no_ratio_are_refused(left: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match="pair"):
        paired_bootstrap(left, right)


def test_groups_are_resampled_whole_and_weighted() -> None:
    """Values of one group repeat one another: a hundred of them tell no more than one does."""
    found = grouped_bootstrap([1.0, 2.0, 4.0], [3.0, 1.0, 1.0], ["a", "b", "c"])
    assert (found.estimate, found.pairs) == (pytest.approx(9 / 5), 3)
    repeated = grouped_bootstrap([1.0, 2.0, 4.0] * 100, [3.0, 1.0, 1.0] * 100, ["a", "b", "c"] * 100)
    assert repeated == pytest.approx(found)
    assert 1.0 <= found.low < found.estimate < found.high <= 4.0
    alone = grouped_bootstrap([1.0, 3.0], [1.0, 1.0], ["a", "a"])
    assert (alone.estimate, alone.low, alone.pairs) == (2.0, -math.inf, 1)
    assert alone.as_json() == {"estimate": 2.0, "low": None, "high": None, "pairs": 1}
    with pytest.raises(ValueError, match="in 1 groups"):
        grouped_bootstrap([1.0, 2.0], [1.0, 1.0], ["a"])
