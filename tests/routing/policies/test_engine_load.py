"""What the engines do to one another, against its definition: every pair of engines looked up by itself."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.features import RequestFeatures
from app.routing.policies.engine_load import engine_loads, hindrance
from app.routing.snapshot import EngineView, Snapshot

Make = Callable[..., Any]
ENGINES = ("fp16", "int8", "gptq", "speculative")
names = st.sampled_from(ENGINES)
ASKED = RequestFeatures(prompt_tokens=100, expected_output_tokens=50)


@given(
    st.dictionaries(names, st.dictionaries(names, st.floats(1, 4))),
    st.dictionaries(names, st.integers(0, 20), min_size=1),
)
def test_each_engine_is_slowed_by_those_that_run_and_slows_them(
    interference: dict[str, dict[str, float]], running: dict[str, int]
) -> None:
    live = Snapshot(engines={name: EngineView(engine=name, in_flight=load) for name, load in running.items()})

    def added(engine: str, other: str) -> float:
        return interference.get(engine, {}).get(other, 1.0) - 1.0

    for name, found in engine_loads(ASKED, live, hindrance(interference)).items():
        others = {other: load for other, load in running.items() if other != name and load}
        assert found.slowdown == pytest.approx(sum(added(name, other) for other in others))
        assert found.burden == pytest.approx(sum(load * added(other, name) for other, load in others.items()))


def test_no_more_run_than_an_engine_decodes_at_once() -> None:
    live = Snapshot(
        engines={
            "fp16": EngineView(engine="fp16", in_flight=9, max_running=4),
            "int8": EngineView(engine="int8"),
            "gptq": EngineView(engine="gptq", in_flight=600, max_running=1000),
        }
    )
    found = engine_loads(ASKED, live, hindrance({"fp16": {"int8": 1.5}, "gptq": {"int8": 2.0}}))
    assert (found["fp16"].running, found["int8"].running, found["gptq"].running) == (4, 0, 512)
    assert found["int8"].burden == pytest.approx(4 * 0.5 + 512 * 1.0)


def test_a_tags_correction_goes_before_its_engines() -> None:
    live = Snapshot(
        engines={name: EngineView(engine=name) for name in ("fp16", "int8", "gptq")},
        corrections={"fp16": 1.2, "int8": 1.3, "int8:none": 0.9},
    )
    found = engine_loads(ASKED, live, {})
    assert [found[name].correction for name in live.engines] == [1.2, 0.9, 1.0]
