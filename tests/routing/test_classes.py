import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.classes import (
    BatchPressure,
    RequestClass,
    Shape,
    batch_pressure,
    classify,
    output_shape,
    prefill_score,
    prompt_shape,
)
from app.routing.tags import Tag


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "pressure", "score"),
    [
        (128, 32, False, 0),
        (384, 32, False, 15),
        (768, 32, False, 15 + 10 + 10),
        (1024, 8, False, 15 + 10 + 30 + 20),
        (512, 8, False, 15 + 30 + 20),
        (512, 16, False, 15 + 20 + 10),
        (128, 8, False, 30),
        (1024, 64, False, 25 - 20),
        (1024, 128, False, 0),
        (2048, 128, True, 0),
        (2048, 40, True, 25 + 20 + 5),
        (0, 0, False, 30 + 20),
    ],
)
def test_prefill_score_is_the_papers_table(prompt_tokens: int, output_tokens: int, pressure: bool, score: int) -> None:
    assert prefill_score(prompt_tokens, output_tokens, pressure) == score


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.booleans())
def test_prefill_score_is_bounded(prompt_tokens: int, output_tokens: int, pressure: bool) -> None:
    assert 0 <= prefill_score(prompt_tokens, output_tokens, pressure) <= 100


def test_shapes_change_at_the_papers_thresholds() -> None:
    assert [prompt_shape(n) for n in (383, 384, 767, 768)] == [Shape.SHORT, Shape.BETWEEN, Shape.BETWEEN, Shape.LONG]
    assert [output_shape(n) for n in (64, 65, 127, 128)] == [Shape.SHORT, Shape.BETWEEN, Shape.BETWEEN, Shape.LONG]


def test_batch_pressure_counts_this_request() -> None:
    assert [batch_pressure(n) for n in (1, 2, 3, 4)] == [
        BatchPressure.LOW,
        BatchPressure.MEDIUM,
        BatchPressure.MEDIUM,
        BatchPressure.HIGH,
    ]


def test_the_first_class_that_applies_wins() -> None:
    low, high = BatchPressure.LOW, BatchPressure.HIGH
    assert classify(high, True, True, Tag.MATHEMATICS, 2000, 200, 50) is RequestClass.BATCHED
    assert classify(low, True, True, Tag.MATHEMATICS, 2000, 200, 50) is RequestClass.SHARED_PREFIX
    assert classify(low, False, True, Tag.MATHEMATICS, 2000, 200, 50) is RequestClass.MEMORY_PRESSURE
    assert classify(low, False, False, Tag.NONE, 2000, 128, 50) is RequestClass.DECODE_HEAVY
    assert classify(low, False, False, Tag.MATHEMATICS, 100, 10, 0) is RequestClass.DECODE_HEAVY
    assert classify(low, False, False, Tag.MULTIPLE_CHOICE, 100, 10, 0) is RequestClass.PREFILL_HEAVY
    assert classify(low, False, False, Tag.NONE, 768, 100, 0) is RequestClass.PREFILL_HEAVY
    assert classify(low, False, False, Tag.NONE, 100, 10, 41) is RequestClass.PREFILL_HEAVY
    assert classify(low, False, False, Tag.NONE, 100, 100, 40) is RequestClass.STANDARD
