from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.comparison import (
    LIGHT,
    SATURATING,
    Row,
    class_oracle,
    common_latencies,
    hindsight,
    rate_summary,
    sentences,
    training_rows,
)
from loadgen.statistics import percentile

STATICS = ("static:a", "static:b")


def row(policy: str, index: int, latency_ms: float, **more: object) -> Row:
    fields = {
        "policy": policy,
        "name": "short" if index % 2 else "long",
        "tag": "none",
        "mode": policy.removeprefix("static:"),
        "rate": LIGHT,
        "round": 0,
        "index": index,
        "status": "ok",
        "latency_ms": latency_ms,
        "ttft_ms": 1.0,
        "energy_j": None,
        "output_tokens": 10,
        "started_s": float(index),
        **more,
    }
    return Row(**fields)  # type: ignore[arg-type]


def rows_with(choice: str, more: float = 1.0) -> list[Row]:
    """`a` is fast on long requests and `b` on short ones; `cost` takes the faster, the slower, or always `a`."""
    rows = []
    for index in range(8):
        by_mode = {"a": 100.0 if index % 2 == 0 else 300.0, "b": 200.0 if index % 2 else 400.0}
        taken = {"best": min(by_mode.values()), "worst": max(by_mode.values()), "a": by_mode["a"]}[choice]
        rows += [row(f"static:{mode}", index, ms) for mode, ms in by_mode.items()] + [row("cost", index, taken * more)]
    return rows


@pytest.mark.parametrize(("choice", "share"), [("best", 1.0), ("a", 0.0), ("worst", -3.0)])
def test_the_share_of_the_headroom(choice: str, share: float) -> None:
    found = rate_summary(rows_with(choice), LIGHT, STATICS)
    assert found is not None
    assert (found["best_static"], found["oracle_ms"], found["class_oracle_ms"]) == ("static:a", 150.0, 150.0)
    assert found["best_static_by_class"] == {"long": "static:a", "short": "static:b"}
    against = found["against_best_static"]["cost"]
    assert against["headroom_share"]["estimate"] == pytest.approx(share)
    assert against["headroom_share"]["low"] <= share <= against["headroom_share"]["high"]
    assert against["headroom_share"]["pairs"] == 8


def test_ratios_of_the_mean_and_of_the_p95_have_intervals_over_requests() -> None:
    ours, theirs = [100.0] * 18 + [900.0] * 2, [200.0] * 18 + [300.0] * 2
    rows = [row("cost", index, ms) for index, ms in enumerate(ours)]
    rows += [row("static:a", index, ms) for index, ms in enumerate(theirs)]
    rows += [row("rules", index, 2 * ms) for index, ms in enumerate(theirs)]
    found = rate_summary(rows, LIGHT, STATICS)
    assert found is not None
    for against, times in ((found["against_best_static"]["cost"], 1.0), (found["against_rules"]["cost"], 2.0)):
        assert against["mean_ratio"]["estimate"] == pytest.approx(sum(ours) / sum(theirs) / times)
        assert against["p95_ratio"]["estimate"] == pytest.approx(percentile(ours, 95) / percentile(theirs, 95) / times)
        # A few slow requests more or less: the geometric mean of each request's ratio hides them.
        assert against["mean_ratio"]["low"] < 0.6 / times < 1.2 / times < against["mean_ratio"]["high"]
        assert against["p95_ratio"]["low"] == pytest.approx(0.5 / times)
        assert against["latency_ratio"]["estimate"] < 0.7 / times
        assert against["mean_ratio"]["pairs"] == 20
    by_class = found["against_best_static"]["cost"]["mean_ratio_by_class"]
    assert by_class["short"]["estimate"] == by_class["long"]["estimate"] == pytest.approx(sum(ours) / sum(theirs))
    assert set(found["against_rules"]) == {"cost", "static:a"}
    words = sentences({LIGHT: found})[0]
    assert "0.86 [0.5" in words
    assert "times the P95" in words
    assert "against rules: 0.43 [" in words


def test_energy_is_of_the_requests_that_have_it_and_says_how_many() -> None:
    rows = [row("static:a", index, 100.0, energy_j=joules) for index, joules in enumerate((2.0, None, 4.0))]
    found = rate_summary([*rows, *(row("static:b", index, 200.0) for index in range(3))], LIGHT, STATICS)
    assert found is not None
    figures = {policy: (one["energy_j"], one["energy_requests"]) for policy, one in found["policies"].items()}
    assert figures == {"static:a": (3.0, 2), "static:b": (None, 0)}


def test_only_what_every_policy_answered_is_compared() -> None:
    rows = [*rows_with("best"), row("broken", 0, 1.0, status="http_error")]
    rows[3:6] = [row(one.policy, 1, one.latency_ms, status="stalled") for one in rows[3:4]] + rows[4:6]
    found = rate_summary(rows, LIGHT, STATICS)
    assert found is not None
    assert found["compared_requests"] == 7
    assert found["policies"]["static:a"]["errors"] == 1
    assert rate_summary(rows, SATURATING, STATICS) is None


def test_a_mode_that_is_not_allowed_is_neither_best_nor_oracle() -> None:
    found = rate_summary(rows_with("best"), LIGHT, ("static:b",))
    assert found is not None
    assert (found["best_static"], found["oracle_ms"]) == ("static:b", 300.0)


def test_throughput_is_over_the_run_and_words_say_it() -> None:
    rows = [
        row(policy, index, ms, rate=SATURATING, round=number)
        for policy, ms in (("static:a", 2000.0), ("cost", 1000.0), ("rules", 1500.0))
        for number in (0, 1)
        for index in range(4)
    ]
    found = rate_summary(rows, SATURATING, STATICS)
    assert found is not None
    assert found["policies"]["cost"]["tokens_per_s"] == pytest.approx(40 / 4)
    assert found["against_best_static"]["cost"]["throughput_ratio"]["estimate"] == pytest.approx(5 / 4)
    assert found["against_rules"]["cost"]["latency_ratio"]["estimate"] == pytest.approx(1 / 1.5)
    words = sentences({SATURATING: found})
    assert words[0].startswith("Saturating load: cost takes 1000 ms on average (P95 1000), static:a, the best single")


def test_a_round_whose_tokens_are_not_all_known_has_no_throughput() -> None:
    rows = [row(policy, index, 1000.0, round=number) for policy in STATICS for number in (0, 1) for index in range(4)]
    whole = rate_summary(rows, LIGHT, STATICS)
    rows[0] = row(STATICS[0], 0, 1000.0, round=0, output_tokens=None)
    one_round = rate_summary(rows, LIGHT, STATICS)
    neither = rate_summary([replace(item, output_tokens=None) for item in rows], LIGHT, STATICS)
    assert whole is not None
    assert one_round is not None
    assert neither is not None
    assert whole["policies"] == one_round["policies"], "the other round's is known"
    pairs = [found["against_best_static"][STATICS[1]]["throughput_ratio"] for found in (whole, one_round)]
    assert [found["pairs"] for found in pairs] == [2, 1]
    assert neither["policies"][STATICS[0]]["tokens_per_s"] is None
    assert neither["against_best_static"][STATICS[1]]["throughput_ratio"] is None


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=1, max_size=20))
@settings(deadline=None)
def test_the_hindsight_oracle_is_below_the_class_oracle_and_both_below_any_mode(
    latencies: list[tuple[float, float]],
) -> None:
    rows = [
        row(policy, index, pair[place]) for index, pair in enumerate(latencies) for place, policy in enumerate(STATICS)
    ]
    found = common_latencies(rows, LIGHT)
    bound, by_class = sum(hindsight(found, STATICS).values()), sum(class_oracle(found, STATICS).values())
    best = min(sum(found[policy].values()) for policy in STATICS)
    assert bound <= by_class * (1 + 1e-9)
    assert by_class <= best * (1 + 1e-9)


def test_training_rows_hold_every_fixed_mode_of_a_prompt() -> None:
    rows = [*rows_with("best"), row("static:a", 0, 77.0, rate=SATURATING)]
    features = {(LIGHT, 0, 0): {"prompt_tokens": 5}, (SATURATING, 0, 0): {"prompt_tokens": 5}}
    light, saturating = training_rows(rows, features, seed=3)
    assert light["group"] == saturating["group"] == "long/3/0", "one prompt, one group"
    assert light["modes"] == {
        "a": {"latency_ms": 100.0, "energy_j": None},
        "b": {"latency_ms": 400.0, "energy_j": None},
    }
    assert set(saturating["modes"]) == {"a"}
