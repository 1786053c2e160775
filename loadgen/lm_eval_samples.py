"""Right and wrong answers from lm-eval's `--log_samples` files, so that its own tasks can pass the gate too."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.benchmarks import Marking, Question
from loadgen.quality_gate import PairedAnswer

# First that a row has; both are 0 or 1 a question.
_METRICS = ("acc", "exact_match")
PREFERRED_FILTER = "flexible-extract"  # lm-eval marks a generated answer once a filter


class SamplesUnreadable(Exception):
    """A file is missing, is none of lm-eval's, or has no partner; the message says which."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of samples, given as `MODE:SCOPE=FILE`."""

    mode: str
    scope: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Raises ValueError for another form."""
        name, equals, path = text.partition("=")
        mode, colon, scope = name.partition(":")
        if not (equals and colon and mode and scope and path):
            raise ValueError(f"{text!r} is not MODE:SCOPE=FILE, such as gptq:mathematics=samples_gsm8k.jsonl")
        return cls(mode, scope, Path(path))


@dataclass(frozen=True, slots=True)
class Mark:
    """One question's mark and the probability of a blind guess."""

    right: bool
    chance: float


def pair_samples(sources: Sequence[Source], reference_mode: str) -> dict[tuple[str, str], list[PairedAnswer]]:
    """Pairs by (mode, scope): each mode's questions with the same ones of the reference in that scope.

    Raises SamplesUnreadable.
    """
    marks = {(source.mode, source.scope): read_samples(source.path) for source in sources}
    found: dict[tuple[str, str], list[PairedAnswer]] = {}
    for (mode, scope), answers in marks.items():
        if mode == reference_mode:
            continue
        reference = marks.get((reference_mode, scope))
        if reference is None:
            raise SamplesUnreadable(f"no samples of {reference_mode} in scope {scope} to compare {mode} with")
        shared = [key for key in reference if key in answers]
        if not shared:
            raise SamplesUnreadable(f"{mode} and {reference_mode} have no question of scope {scope} in common")
        found[mode, scope] = [
            PairedAnswer(reference[key].right, answers[key].right, reference[key].chance) for key in shared
        ]
    return found


def read_samples(path: Path) -> dict[str, Mark]:
    """Marks by question. Raises SamplesUnreadable."""
    by_filter: dict[str, dict[str, Mark]] = {}
    number = 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            if line.strip():
                row = json.loads(line)
                by_filter.setdefault(str(row.get("filter", "none")), {})[_key(row)] = _mark(row)
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesUnreadable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
        raise SamplesUnreadable(f"{path}, line {number}, is no sample of lm-eval: {words}") from error
    if not by_filter:
        raise SamplesUnreadable(f"{path} has no samples")
    return by_filter.get(PREFERRED_FILTER) or next(iter(by_filter.values()))


def _key(row: Mapping[str, Any]) -> str:
    """The document's hash where lm-eval wrote it: numbers alone would pair different questions of two sets."""
    return f"{row['doc_id']}/{row.get('doc_hash', '')}"


def _mark(row: Mapping[str, Any]) -> Mark:
    metric = next((name for name in _METRICS if name in row), None)
    if metric is None:
        raise ValueError(f"it has none of {', '.join(_METRICS)}")
    guess = Question("", "", "", Marking.CHOICE, labels=("",) * _choices(row, metric))
    return Mark(float(row[metric]) >= 0.5, guess.chance)


def _choices(row: Mapping[str, Any], metric: str) -> int:
    """How many answers there were to choose from; 0 where there was no choice."""
    document = row.get("doc")
    labels = document.get("valid_labels") if isinstance(document, dict) else None
    if labels:  # of a question from our files, whose letter may have been written
        return len(labels)
    scored = len(row.get("arguments") or ()) if metric == "acc" else 0
    # Mutual information scores every choice twice, the second time without the question.
    scored //= 2 if "acc_mutual_info" in row else 1
    # A single continuation that is most probable or not is no choice.
    return scored if scored > 1 else 0
