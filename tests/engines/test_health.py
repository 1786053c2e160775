"""Progress decides, not patience: long prompts are healthy, stopped, gone and stuck engines are not."""

from hypothesis import given
from hypothesis import strategies as st

from app.engines.health import failure, observe
from app.engines.processes import Vitals

STALLED_S, STUCK_S = 10.0, 300.0


def run(readings, every_s=4.0):
    """The first failure over a series of (steps, has_work, vitals), with its time."""
    progress, now_s = None, 0.0
    for steps, has_work, vitals in readings:
        progress = observe(progress, now_s, steps, has_work, vitals)
        if why := failure(progress, now_s, vitals, STALLED_S, STUCK_S):
            return now_s, why
        now_s += every_s
    return None


def busy(cpu_seconds):
    return Vitals(cpu_seconds, (), ())


def test_a_flood_of_long_prompts_is_healthy():
    assert run([(7, True, busy(8.0 * i)) for i in range(50)]) is None


def test_an_idle_engine_is_healthy_for_ever():
    assert run([(7, False, busy(1.0))] * 1000) is None


def test_work_without_steps_or_cpu_is_a_stall_within_20_s():
    at_s, why = run([(7, True, busy(1.0))] * 20)
    assert at_s <= 20
    assert "no progress" in why


def test_a_spinning_engine_that_takes_no_step_is_noticed_in_the_end():
    at_s, why = run([(7, True, busy(8.0 * i)) for i in range(200)])
    assert STUCK_S <= at_s <= STUCK_S + 4
    assert "no step" in why


def test_a_stopped_process_is_noticed_at_the_second_reading():
    stopped = Vitals(1.0, (42,), ())
    assert run([(7, False, busy(1.0)), (7, False, stopped), (7, False, busy(1.0)), (7, False, stopped)]) is None
    at_s, why = run([(7, False, busy(1.0)), (7, False, stopped), (7, False, stopped)])
    assert at_s <= 20
    assert "42 is stopped" in why


def test_a_process_that_ended_is_noticed_at_once():
    at_s, why = run([(7, False, Vitals(1.0, (), (42,)))])
    assert at_s == 0
    assert "42 ended" in why


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_an_engine_that_moves_at_each_reading_is_never_failed(moves):
    steps, cpu, readings = 0, 0.0, []
    for by_step, has_work in moves:
        steps, cpu = (steps + 1, cpu) if by_step else (steps, cpu + 1.0)
        readings.append((steps, has_work, busy(cpu)))
    assert run(readings) is None
