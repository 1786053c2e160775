from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.calibration_plan import (
    FULL_GRIDS,
    MIN_ROUNDS,
    QUICK_GRIDS,
    Engine,
    Grid,
    Pace,
    PrefillTask,
    StepTask,
    Text,
    TogetherTask,
    choose_grid,
    round_order,
    round_s,
    tasks_of,
)

ENGINES = (Engine("fp16", "fp16"), Engine("int8", "int8"), Engine("gptq", "gptq"), Engine("s", "s", speculative=True))
GRID = Grid((64, 256), (1, 8), 16)
paces = st.builds(Pace, st.floats(10, 1e5), st.floats(1e-4, 1.0))


@given(paces, st.floats(5, 1e5), st.integers(8, 10**5), st.sampled_from([QUICK_GRIDS, FULL_GRIDS]))
@settings(deadline=None)
def test_the_richest_grid_that_fits_or_the_poorest(
    pace: Pace, budget_s: float, longest: int, grids: tuple[Grid, ...]
) -> None:
    chosen = choose_grid(ENGINES, grids, pace, budget_s, longest)
    assert len(chosen.prompt_tokens) >= 2
    assert max(chosen.prompt_tokens) < longest
    if (chosen.batches, chosen.output_tokens) != (grids[-1].batches, grids[-1].output_tokens):
        assert MIN_ROUNDS * round_s(ENGINES, chosen, pace) <= budget_s


@given(st.integers(0, 50), st.integers(0, 50))
@settings(deadline=None)
def test_a_round_has_every_task_once_in_an_order_of_its_own(number: int, seed: int) -> None:
    order = list(round_order(ENGINES, GRID, number, seed))
    assert sorted(map(repr, order)) == sorted(repr(task) for group in tasks_of(ENGINES, GRID) for task in group)
    assert order == list(round_order(ENGINES, GRID, number, seed))


def test_engines_are_next_to_one_another_at_each_point() -> None:
    order = list(round_order(ENGINES, GRID, 0, 0))
    places = [place for place, task in enumerate(order) if isinstance(task, PrefillTask) and task.tokens == 256]
    assert places == list(range(places[0], places[0] + 4))


def test_only_speculation_is_measured_on_both_texts_and_every_pair_once() -> None:
    tasks = [task for group in tasks_of(ENGINES, GRID) for task in group]
    assert {task.engine for task in tasks if isinstance(task, StepTask) and task.text is Text.REWRITING} == {"s"}
    pairs = [frozenset((task.engine, task.other)) for task in tasks if isinstance(task, TogetherTask)]
    assert len(pairs) == len(set(pairs)) == 6
