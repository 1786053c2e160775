"""Workload tags: what kind of work a prompt asks for.

A client may say so (`x-modeswitch-workload` or `metadata.workload`). Otherwise a cheap look at the beginning and the
end of the text decides, since that is where instructions stand. The cost does not grow with the text.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

MAX_LABEL_CHARS = 64
"""A longer label is ignored as if it had not been sent."""

HEAD_CHARS = 200
TAIL_CHARS = 500


class Tag(StrEnum):
    NONE = "none"
    MULTIPLE_CHOICE = "multiple_choice"
    BENCHMARK = "benchmark"
    MATHEMATICS = "mathematics"
    CODE = "code"
    REWRITING = "rewriting"


LABELS = {
    **{tag.value: tag for tag in Tag},
    "mcq": Tag.MULTIPLE_CHOICE,
    "math": Tag.MATHEMATICS,
    "coding": Tag.CODE,
    "rewrite": Tag.REWRITING,
    "copy": Tag.REWRITING,
}
"""Labels that name a tag. Any other label is kept as a name for measured quality, and the text decides the tag."""

# Looked for in lower-cased text: a few substring searches are several times faster than one alternation. The lists
# and windows are small, because this is most of what measuring a request costs.
_REWRITING = ("rewrite", "rephrase", "paraphrase", "proofread", " the grammar", " the spelling")
_CODE = ("def ", "function", "import ")
_MATHEMATICS = ("solve ", "calculate", "how m", "equation", "integral", "prove that")
_DIGIT = re.compile(r"\d")
_ASCII_DIGITS = tuple("0123456789")
_OPTION = re.compile(r"^[ \t]*\(?([a-d])[).:][ \t]", re.MULTILINE)


class Labelled(NamedTuple):
    """The tag, and the client's label where it sent a usable one."""

    tag: Tag
    label: str | None


def normalise_label(label: str | None) -> str | None:
    """Lower case, trimmed; None for no label, an empty one or one above `MAX_LABEL_CHARS`."""
    if not label or len(label) > MAX_LABEL_CHARS:
        return None
    return label.strip().lower().replace("-", "_") or None


def tag_of(text: str, label: str | None = None) -> Labelled:
    """The tag of a prompt: the client's word first, else detected from the text.

    `text` is best the last user message; a whole rendered prompt works too.
    """
    name = normalise_label(label)
    if name is not None:
        named = LABELS.get(name)
        if named is not None:
            return Labelled(named, name)
    return Labelled(detect(text), name)


def detect(text: str) -> Tag:
    """The tag that the first `HEAD_CHARS` and last `TAIL_CHARS` characters of `text` suggest.

    Rewriting is asked before code and mathematics: rewriting a program is rewriting, its output repeats the prompt.
    """
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
    window = text.lower()
    if _offers_options(window):
        return Tag.MULTIPLE_CHOICE
    for word in _REWRITING:
        if word in window:
            return Tag.REWRITING
    # One character is found at the speed of memory, so it guards the longer search.
    if ("`" in window and "```" in window) or ("#" in window and "#include" in window):
        return Tag.CODE
    for word in _CODE:
        if word in window:
            return Tag.CODE
    if "\\" in window and "\\frac" in window:
        return Tag.MATHEMATICS
    # "How many of you like tea" is no calculation: a problem gives numbers or formulas.
    if _gives_figures(window):
        for word in _MATHEMATICS:
            if word in window:
                return Tag.MATHEMATICS
    return Tag.NONE


def _gives_figures(window: str) -> bool:
    if "=" in window:
        return True
    if not window.isascii():
        return _DIGIT.search(window) is not None
    for digit in _ASCII_DIGITS:  # noqa: SIM110 (a generator takes longer than all ten searches)
        if digit in window:
            return True
    return False


def _offers_options(window: str) -> bool:
    # Three options are three lines.
    if window.count("\n") < 2:
        return False
    if "b)" not in window and "b. " not in window and "\nb" not in window:
        return False
    options = {match.group(1) for match in _OPTION.finditer(window)}
    return {"a", "b", "c"} <= options or {"b", "c", "d"} <= options
