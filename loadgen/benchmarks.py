"""Questions from the user's JSON-lines files, and how an answer is marked.

The marking is lm-eval's: a choice is the one that the model finds most probable after "Answer:", a number is the last
one of a greedy answer. lm-eval itself is not a dependency: it brings thirty packages (pandas and pyarrow among them),
writes its results at the end only, and its client wants the tokenizer that the server already has. Who prefers it runs
it on tasks that `lm-eval-tasks` writes, with `--log_samples`, and hands its files to `quality --samples`.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.routing.tags import Tag, normalise_label, tag_of


class BenchmarkUnreadable(Exception):
    """A file is missing or a line of it is no question; the message says which and why."""


class Marking(StrEnum):
    """What a right answer is. The values are those of the files' `evaluation_mode`."""

    CHOICE = "multiple_choice_accuracy"
    NUMBER = "final_answer_exact_match"
    TEXT = "external_judge"  # no right answer: only likeness to the reference mode can be measured


NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

# With so few right answers there is little left to lose, and no loss of 1.5 points to see.
_EXACT_MATCH_FLOOR = 0.05


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `labels` are the names of its choices, empty where there are none."""

    id: str
    suite: str
    prompt: str
    marking: Marking
    reference: str | None = None
    labels: tuple[str, ...] = ()
    language: str = ""

    @property
    def tag(self) -> Tag:
        if self.marking is Marking.CHOICE:
            return Tag.MULTIPLE_CHOICE
        return Tag.MATHEMATICS if self.marking is Marking.NUMBER else tag_of(self.prompt).tag

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess; for numbers, below which an accuracy has no room to fall."""
        return 1 / len(self.labels) if self.labels else _EXACT_MATCH_FLOOR


def read_questions(paths: Iterable[Path], *, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Questions of all files; at most `limit` of each, drawn with `seed`.

    A line has `id`, `prompt`, `evaluation_mode` (a value of `Marking`) and, where there is a right answer, `reference`
    and for choices `valid_labels`; `benchmark_suite` and `benchmark_language` are optional. Raises BenchmarkUnreadable.
    """
    questions: list[Question] = []
    for path in paths:
        found = _read(path)
        if limit is not None and limit < len(found):
            found = random.Random(f"{path.name}/{seed}").sample(found, limit)
        questions += found
    return questions


def _read(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkUnreadable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_question(path, json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            words = f"{type(error).__name__}: {error}"
            raise BenchmarkUnreadable(f"{path}, line {number}, is no question: {words}") from error
    if not found:
        raise BenchmarkUnreadable(f"{path} has no questions")
    return found


def _question(path: Path, row: dict[str, Any]) -> Question:
    marking = Marking(row["evaluation_mode"])
    reference = row.get("reference")
    labels = tuple(str(label) for label in row.get("valid_labels") or ())
    if marking is Marking.CHOICE and (len(labels) < 2 or reference not in labels):
        raise ValueError("a choice needs valid_labels, its reference among them")
    if marking is Marking.NUMBER and (reference is None or last_number(str(reference)) is None):
        raise ValueError("its reference is no number")
    return Question(
        id=str(row["id"]),
        suite=normalise_label(str(row.get("benchmark_suite") or path.stem)) or "questions",
        prompt=str(row["prompt"]),
        marking=marking,
        reference=None if reference is None else str(reference),
        labels=labels,
        language=str(row.get("benchmark_language") or ""),
    )


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separated by commas or not."""
    found = NUMBER_PATTERN.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def number_right(question: Question, answer: str) -> bool:
    """Exact match of the last numbers."""
    return last_number(answer) == last_number(question.reference or "")


def most_probable(labels: Sequence[str], top: dict[str, float]) -> str | None:
    """The label with the highest log-probability among a position's most probable tokens, by their text.

    A label that is missing there is less probable than every one that is there, so the answer is exact as soon as one
    is found. None when there is none.
    """
    best: tuple[float, str] | None = None
    for text, logprob in top.items():
        label = text.strip()
        if label in labels and (best is None or logprob > best[0]):
            best = (logprob, label)
    return None if best is None else best[1]
