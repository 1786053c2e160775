import pytest

from loadgen.calibration_plan import Engine, StepTask, Text, TogetherTask
from loadgen.fitting import EngineSamples
from loadgen.sweep_interference import Beside, Interference, beside_of_round, interference_round

ENGINES = (Engine("a", "a"), Engine("b", "b"), Engine("s", "s", speculative=True))


def test_a_round_has_every_engine_alone_once_and_every_pair_once() -> None:
    tasks = list(interference_round(ENGINES, 0, 1))
    alone = [task for task in tasks if isinstance(task, StepTask)]
    pairs = {frozenset((task.engine, task.other)) for task in tasks if isinstance(task, TogetherTask)}
    assert sorted(alone) == [StepTask(name, 1, Text.FREE) for name in ("a", "b", "s")]
    assert (len(pairs), len(tasks)) == (3, 6)
    orders = {tuple(map(repr, interference_round(ENGINES, number, 1))) for number in range(10)}
    assert len(orders) > 5, "alone and together change places from round to round"


def test_what_a_round_tells() -> None:
    a = EngineSamples(step_ms={Text.FREE: {1: [10.0]}}, together_ms={"b": [15.0], "s": []})
    b = EngineSamples(together_ms={"a": [9.0]})
    assert beside_of_round({"a": a, "b": b}) == [Beside("a", "b", 10.0, 15.0)], "b was not timed alone"


def test_slowdowns_are_paired_by_round() -> None:
    found = Interference()
    for drift in (1.0, 2.0, 4.0):
        found.seen += [Beside("a", "b", 10.0 * drift, 15.0 * drift), Beside("b", "a", 20.0, 20.0 * drift)]
    slower = found.slowdowns()
    assert slower["a", "b"][:3] == pytest.approx((1.5, 1.5, 1.5)), "drift that both share cancels"
    assert slower["b", "a"].estimate == pytest.approx(2.0)
    assert slower["b", "a"].low < 2.0 < slower["b", "a"].high
    (row, _) = found.as_json()["rows"]
    assert (row["engine"], row["beside"], row["times_slower"]["pairs"]) == ("a", "b", 3)
