import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.best_mode import Constraint, Constraints, Measured, best_mode, safe_modes, score

REFERENCE = Measured(100.0, 4.0, 1000.0, accuracy_pct=50.0, rouge_reference=0.30)


@pytest.mark.parametrize(
    ("mode", "broken"),
    [
        (Measured(50.0, 4.0, 1020.0, accuracy_pct=48.5), set()),
        (Measured(50.0, 4.01, 1021.0), {Constraint.ENERGY, Constraint.MEMORY}),
        (Measured(50.0, accuracy_pct=48.4), {Constraint.QUALITY}),
        (Measured(50.0, rouge_reference=0.27), {Constraint.QUALITY}),
        (Measured(50.0, rouge_fp16=0.79), {Constraint.QUALITY}),
        (Measured(50.0, accuracy_pct=50.0, rouge_reference=0.0), set()),
        (Measured(50.0), set()),
    ],
)
def test_each_constraint_at_its_edge(mode: Measured, broken: set[Constraint]) -> None:
    assert Constraints().broken_by(mode, REFERENCE) == broken


def test_the_fastest_safe_mode_wins_and_the_reference_is_always_safe() -> None:
    table = {"ref": REFERENCE, "fast": Measured(10.0, 8.0), "safe": Measured(60.0, 2.0), "slow": Measured(150.0, 1.0)}
    assert best_mode(table, "ref", Constraints()) == "safe"
    assert safe_modes(table, "ref", Constraints()) == ["safe", "ref", "slow"]
    assert best_mode({"ref": REFERENCE, "fast": Measured(10.0, 8.0)}, "ref", Constraints()) == "ref"
    with pytest.raises(KeyError):
        best_mode({"safe": REFERENCE}, "ref", Constraints())


@pytest.mark.parametrize(
    ("mode", "judged"),
    [
        (Measured(50.0), set()),
        (Measured(50.0, 0.0, 1.0), {Constraint.ENERGY, Constraint.MEMORY}),
        (Measured(50.0, rouge_fp16=0.0), {Constraint.QUALITY}),
        (Measured(50.0, rouge_reference=0.3), {Constraint.QUALITY}),
        (Measured(50.0, accuracy_pct=0.0), {Constraint.QUALITY}),
    ],
)
def test_a_constraint_judges_what_was_measured_on_both_sides(mode: Measured, judged: set[Constraint]) -> None:
    assert Constraints().judged(mode, REFERENCE) == judged
    if mode.rouge_fp16 is None:
        assert Constraints().judged(mode, Measured(100.0)) == set()


def test_a_score_by_hand() -> None:
    table = {
        "a": {"ref": Measured(100.0, 4.0), "q": Measured(50.0, 2.0)},
        "b": {"ref": Measured(90.0, 4.0), "q": Measured(30.0, 5.0)},
    }
    found = score({"a": "q", "b": "q"}, table, {"a": 3, "b": 1}, "ref", Constraints())
    assert found.speedup == pytest.approx((3 * 2 + 3) / 4)
    assert found.energy_ratio == pytest.approx((3 * 0.5 + 1.25) / 4)
    assert found.latency_capture == pytest.approx((3 * 1 + 90 / 30) / 4)
    assert (found.oracle_match, found.unsafe, found.broken[Constraint.ENERGY]) == (0.75, 1, 1)
    slower = score({"a": "q", "b": "q"}, table, {"a": 3, "b": 1}, "ref", Constraints(), overhead_ms=50.0)
    assert slower.speedup == pytest.approx((3 * 1 + 90 / 80) / 4)


def test_unknown_energy_is_not_zero() -> None:
    table = {"a": {"ref": Measured(100.0, 4.0), "q": Measured(50.0)}}
    assert score({"a": "q"}, table, {"a": 1}, "ref", Constraints()).energy_ratio is None


LATENCY = st.floats(1.0, 1e4)


@given(st.dictionaries(st.sampled_from("pqrs"), st.builds(Measured, LATENCY, st.floats(0.1, 10.0))), LATENCY)
def test_no_safe_choice_beats_the_oracle(modes: dict[str, Measured], reference_ms: float) -> None:
    by_mode = {**modes, "ref": Measured(reference_ms, 1.0)}
    for name in by_mode:
        found = score({"a": name}, {"a": by_mode}, {"a": 1}, "ref", Constraints())
        assert found.unsafe == 1 or found.latency_capture <= 1.0
