"""The policies on the paper's own measurements, under its own constraints, by the code that `replay paper` uses."""

import dataclasses

import pytest

from app.routing.tags import Tag
from loadgen.best_mode import Constraints, Measured
from loadgen.paper.cost import cost_choices, decided, fitted_profile, output_tokens, shown
from loadgen.paper.figures import score_choices, table_oracle
from loadgen.paper.rules import PAPER_NAMES
from loadgen.paper.tables import FP16, PaperTables, TablesDamaged, load_tables


@pytest.fixture(scope="module")
def tables() -> PaperTables:
    return load_tables()


def score(tables: PaperTables, choices: dict[str, str]) -> tuple[float, int]:
    """Mean speed-up over the families, and how many choices violate a constraint."""
    found = score_choices(tables, {family: PAPER_NAMES[mode] for family, mode in choices.items()})
    return found.speedup, found.unsafe


def changed(tables: PaperTables, mode: str, latency_factor: float) -> PaperTables:
    """The tables with modes whose name begins so made that many times as slow."""
    fixed: dict[tuple[str, str, str], Measured] = {
        key: dataclasses.replace(row, latency_ms=row.latency_ms * latency_factor) if key[1].startswith(mode) else row
        for key, row in tables.fixed.items()
    }
    return dataclasses.replace(tables, fixed=fixed)


@pytest.mark.parametrize(
    ("mode", "speedup", "violations"), [("gptq", 1.93, 5), ("int8", 1.55, 1), ("speculative", 1.42, 3), ("fp16", 1, 0)]
)
def test_static_modes_have_the_known_scores(tables: PaperTables, mode: str, speedup: float, violations: int) -> None:
    found = decided(f"static:{mode}", tables)
    assert set(found.values()) == {mode}
    assert score(tables, found) == (pytest.approx(speedup, abs=0.005), violations)


def test_the_oracle_has_its_known_score(tables: PaperTables) -> None:
    best = score_choices(tables, table_oracle(tables))
    assert (best.speedup, best.unsafe) == (pytest.approx(1.995, abs=0.0005), 0)


def test_requests_are_shown_as_the_paper_describes_them(tables: PaperTables) -> None:
    outputs = {name: output_tokens(tables, name) for name in tables.families}
    assert [outputs[name] for name in tables.synthetic] == [32, 128, 32, 128, 128, 128]
    assert [outputs[name] for name in tables.benchmarks] == [1, 159, 1, 1, 1], "benchmarks end before they must"
    for name, family in tables.families.items():
        asked, _ = shown(tables, name)
        assert (asked.expected_output_tokens, asked.tag) == (outputs[name], family.tag)
        assert (asked.shared_prefix, asked.memory_pressure) == (family.shared_prefix, family.memory_pressure)
        assert asked.label is None
    assert shown(tables, "gsm8k_eval", named=True)[0].label == "gsm8k_eval"
    assert shown(tables, "gsm8k_eval")[0].tag is Tag.MATHEMATICS


def test_cost_is_near_the_oracle_without_a_violation_and_without_names(tables: PaperTables) -> None:
    speedup, violations = score(tables, decided("cost", tables))
    assert violations == 0
    assert speedup >= 1.97


def test_names_that_the_profile_knows_bring_the_rest(tables: PaperTables) -> None:
    """INT8 loses four points on one multiple-choice benchmark and none on the others."""
    speedup, violations = score(tables, decided("cost", tables, named=True))
    assert violations == 0
    assert speedup >= 1.98


def test_cost_beats_the_rules(tables: PaperTables) -> None:
    rules, _ = score(tables, decided("rules", tables))
    cost, _ = score(tables, decided("cost", tables))
    assert cost > rules


def test_a_changed_row_changes_the_choice(tables: PaperTables) -> None:
    """The score comes from the rows: with GPTQ ten times slower the policy leaves it."""
    assert "gptq_4bit" in set(cost_choices(tables)["cost"].values())
    slower = changed(tables, "gptq", 10)
    assert not {mode for mode in cost_choices(slower)["cost"].values() if mode.startswith("gptq")}


def test_the_profile_is_of_the_rows(tables: PaperTables) -> None:
    """Four of the reference's numbers, worked out by hand from `fixed_modes.csv`."""
    fp16 = fitted_profile(tables).modes["fp16"]
    step_ms = ((2566.780953 - 683.930394) / 96 + (2611.900087 - 715.355311) / 96) / 2
    assert fp16.step_ms == ((1, pytest.approx(step_ms)),)
    assert [tokens for tokens, _ in fp16.prefill_ms] == [128, 512, 1024, 2048]
    assert fp16.prefill_ms[3][1] == pytest.approx(2705.483753 - 127 * step_ms)
    speculation = fitted_profile(tables).modes["speculative"].speculation
    assert speculation is not None
    assert speculation.accepted_per_step["mathematics"] > 0


def test_rows_that_fit_no_profile_are_named(tables: PaperTables) -> None:
    kept = {key: row for key, row in tables.fixed.items() if "short_output" not in key[2]}
    families = {name: family for name, family in tables.families.items() if "short_output" not in name}
    with pytest.raises(TablesDamaged, match="no step can be fitted"):
        decided("cost", dataclasses.replace(tables, fixed=kept, families=families))
    without = {key: row for key, row in tables.fixed.items() if (key[1], key[2]) != (FP16, "gsm8k_eval")}
    with pytest.raises(TablesDamaged, match="gsm8k_eval"):
        decided("cost", dataclasses.replace(tables, fixed=without))


def test_the_limits_are_the_papers() -> None:
    assert (Constraints().energy_ratio_max, Constraints().memory_ratio_max) == (1.0, 1.02)
    assert (Constraints().accuracy_drop_max_points, Constraints().rouge_reference_drop_max) == (1.5, 0.02)
