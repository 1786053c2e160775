import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.tags import MAX_LABEL_CHARS, Tag, detect, normalise_label, tag_of


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("Which planet is largest?\nA) Mars\nB) Jupiter\nC) Venus\nD) Earth\nAnswer:", Tag.MULTIPLE_CHOICE),
        ("Which planet is largest?\n(A) Mars\n(B) Jupiter\n(C) Venus", Tag.MULTIPLE_CHOICE),
        ("Pick one.\n  A. red\n  B. blue\n  C. green", Tag.MULTIPLE_CHOICE),
        ("Rewrite this text in a friendly tone: the meeting is at noon.", Tag.REWRITING),
        ("Please proofread: She go to school.", Tag.REWRITING),
        ("Rewrite this:\n```\ndef f(): pass\n```", Tag.REWRITING),
        ("Fix the bug.\n```python\ndef f(x): return x\n```", Tag.CODE),
        ("Write a Python function that reverses a list.", Tag.CODE),
        ("Natalia sold 48 clips in April. How many clips did she sell?", Tag.MATHEMATICS),
        ("Solve the equation x = 4 - y for y", Tag.MATHEMATICS),
        (r"Evaluate \frac{a}{b}", Tag.MATHEMATICS),
        ("How many of you like tea", Tag.NONE),
        ("Tell me about the history of Rome.", Tag.NONE),
        ("A) is the first letter and B) the second", Tag.NONE),
        ("", Tag.NONE),
    ],
)
def test_detects_the_kind_of_work(text: str, tag: Tag) -> None:
    assert detect(text) is tag


PIECES = (
    *("rewrite", "Paraphrase", " the grammar", "def ", "function", "```", "`", "#include", "#", "\\frac", "solve "),
    *("how many", "prove that", "= 3", "3", "٣", "é", "\n", "\nA) x", "\nB. y", "\n(c) z", "\n d: w", "b. ", "tea "),
)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_shortcuts_find_what_looking_for_everything_finds(text: str) -> None:
    window = text.lower()
    options = set(re.findall(r"^[ \t]*\(?([a-d])[).:][ \t]", window, re.MULTILINE))
    hinted = any(hint in window for hint in ("b)", "b. ", "\nb"))
    if hinted and (options >= set("abc") or options >= set("bcd")):
        expected = Tag.MULTIPLE_CHOICE
    elif any(word in window for word in ("rewrite", "paraphrase", " the grammar")):
        expected = Tag.REWRITING
    elif any(word in window for word in ("```", "#include", "def ", "function")):
        expected = Tag.CODE
    elif "\\frac" in window or (
        any(word in window for word in ("solve ", "how m", "prove that")) and re.search(r"=|\d", window)
    ):
        expected = Tag.MATHEMATICS
    else:
        expected = Tag.NONE
    assert detect(text) is expected


def test_looks_at_both_ends_of_a_long_text() -> None:
    filler = "Lorem ipsum dolor. " * 10_000
    assert detect("Rewrite the following. " + filler) is Tag.REWRITING
    assert detect(filler + "\nA) one\nB) two\nC) three") is Tag.MULTIPLE_CHOICE


@given(st.text(alphabet="abcd()=. \n1`", min_size=701, max_size=900))
def test_only_both_ends_of_a_long_text_are_looked_at(text: str) -> None:
    """So the cost does not grow with the text."""
    assert detect(text) is detect(f"{text[:200]}\n{text[-500:]}")


@pytest.mark.parametrize(
    ("label", "tag", "name"),
    [
        ("math", Tag.MATHEMATICS, "math"),
        (" Multiple-Choice ", Tag.MULTIPLE_CHOICE, "multiple_choice"),
        ("rewrite", Tag.REWRITING, "rewrite"),
        ("gpqa", Tag.NONE, "gpqa"),
        ("x" * MAX_LABEL_CHARS, Tag.NONE, "x" * MAX_LABEL_CHARS),
        ("x" * 10_240, Tag.NONE, None),
        ("math" * 2_560, Tag.NONE, None),
        ("", Tag.NONE, None),
        ("   ", Tag.NONE, None),
        (None, Tag.NONE, None),
    ],
)
def test_a_usable_label_goes_before_the_text(label: str | None, tag: Tag, name: str | None) -> None:
    assert tag_of("Tell me a story.", label) == (tag, name)


def test_a_label_that_names_no_tag_leaves_the_tag_to_the_text() -> None:
    assert tag_of("Rewrite this: a b", "my-workload") == (Tag.REWRITING, "my_workload")


@given(st.text(), st.none() | st.text())
def test_any_text_and_label_are_taken(text: str, label: str | None) -> None:
    tag, name = tag_of(text, label)
    assert isinstance(tag, Tag)
    assert name is None or len(name) <= MAX_LABEL_CHARS * 2
    assert name == normalise_label(label)
