import sys

import pytest

from loadgen.records import RequestRecord
from loadgen.sweep_plan import TrialResult
from loadgen.sweep_trials import Likeness, Trial, likeness


def test_only_prompts_that_both_answered_are_compared() -> None:
    reference = {0: "the cat sat", 1: "one two three four", 2: ""}
    found = likeness(reference, {0: "the cat sat", 1: "one two", 2: "", 7: "who knows"})
    assert found is not None
    # Two of four words in order: precision 1, recall 1/2.
    assert found.rouge_l == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert found.same_text == pytest.approx(2 / 3)
    assert likeness(reference, {}) is None
    assert likeness({}, reference) is None


def test_without_rouge_there_is_agreement_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    assert likeness({0: "a", 1: "b"}, {0: "a", 1: "c"}) == Likeness(None, 0.5)


def test_texts_are_comparable_for_equal_prompts_only() -> None:
    records = [
        RequestRecord(index=3, text="first"),
        RequestRecord(index=3, turn=1, text="after an answer of its own"),
        RequestRecord(index=4, text="other"),
    ]
    result = TrialResult(1.0, None, None, 1.0)
    assert Trial(result, records, equal_prompts=True).texts == {3: "first", 4: "other"}
    assert Trial(result, records, equal_prompts=False).texts == {}
