from hypothesis import given
from hypothesis import strategies as st

from app.routing.classes import Shape
from app.routing.output_length import MIN_SAMPLES, OutputLengthPredictor, OutputSource
from app.routing.tags import Tag

lengths = st.integers(0, 100_000)


def test_max_tokens_only_while_nothing_is_known() -> None:
    predictor = OutputLengthPredictor()
    assert predictor.predict(Tag.NONE, Shape.SHORT, 384) == (384, OutputSource.MAX_TOKENS)
    assert predictor.predict(Tag.NONE, Shape.SHORT, None) == (128, OutputSource.ASSUMED)
    predictor.observe(Tag.CODE, Shape.LONG, 512, 90, 0.0)
    assert predictor.predict(Tag.NONE, Shape.SHORT, 384) == (90, OutputSource.PREDICTED)


def test_learns_by_tag_and_size() -> None:
    """Multiple choice asks for 8 tokens and gets 1; mathematics asks for 384 and gets 159 (measured by the paper)."""
    predictor = OutputLengthPredictor()
    for _ in range(5):
        predictor.observe(Tag.MULTIPLE_CHOICE, Shape.BETWEEN, 8, 1, 0.0)
        predictor.observe(Tag.MATHEMATICS, Shape.BETWEEN, 384, 159, 0.0)
    assert predictor.predict(Tag.MULTIPLE_CHOICE, Shape.BETWEEN, 8).tokens == 1
    assert predictor.predict(Tag.MATHEMATICS, Shape.BETWEEN, 384).tokens == 159
    # Another shape of the same tag is nearer than the mean of all.
    assert predictor.predict(Tag.MATHEMATICS, Shape.SHORT, 300).tokens == 159


def test_follows_a_change() -> None:
    predictor = OutputLengthPredictor()
    for _ in range(500):
        predictor.observe(Tag.NONE, Shape.SHORT, None, 1000, 0.0)
    for _ in range(20):
        predictor.observe(Tag.NONE, Shape.SHORT, None, 10, 24 * 3600.0)
    assert predictor.predict(Tag.NONE, Shape.SHORT, None).tokens < 160


def test_a_clock_that_jumps_back_is_harmless() -> None:
    predictor = OutputLengthPredictor()
    for now_s in (1e9, 0.0, -1e9, 1e9):
        predictor.observe(Tag.NONE, Shape.SHORT, None, 50, now_s)
    assert predictor.predict(Tag.NONE, Shape.SHORT, None).tokens == 50


@given(st.lists(lengths, min_size=MIN_SAMPLES, max_size=100), st.integers(1, 5000))
def test_predictions_are_possible_lengths(seen: list[int], max_tokens: int) -> None:
    predictor = OutputLengthPredictor()
    for number, length in enumerate(seen):
        predictor.observe(Tag.NONE, Shape.SHORT, max_tokens, length, float(number))
    tokens, source = predictor.predict(Tag.NONE, Shape.SHORT, max_tokens)
    assert 1 <= tokens <= max_tokens
    assert source is OutputSource.PREDICTED
    assert tokens <= max(1, *seen)
