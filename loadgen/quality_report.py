"""From answers and texts to evidence by mode and scope, and the tables that show it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import fmean
from typing import Any

from rich.table import Table

from app.routing.profile import GateOutcome, QualityEvidence
from loadgen.answer_fidelity import Wanted
from loadgen.fidelity import TOP_TOKENS, TextFidelity
from loadgen.quality_gate import (
    GENERATED_KL,
    KL,
    Divergence,
    Limits,
    PairedAnswer,
    accuracy_evidence,
    kl_evidence,
    kl_meaning,
    mean_difference_interval,
    mean_interval,
    settle,
)
from loadgen.questioning import Answered
from loadgen.statistics import Interval


@dataclass(slots=True)
class Measured:
    """All results so far, kept outside of the coroutines, so that an interruption loses nothing.

    answers: one list a question, the reference's first. texts: with the scopes that each text speaks for.
    pairs: right answers from elsewhere, by (mode, scope). wanted: modes that must show their own answers, which are
    `generated`. top_tokens: compared at each position of a text.
    """

    answers: list[list[Answered]] = field(default_factory=list)
    texts: list[tuple[tuple[str, ...], TextFidelity]] = field(default_factory=list)
    pairs: dict[tuple[str, str], list[PairedAnswer]] = field(default_factory=dict)
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    generated: dict[str, list[Divergence]] = field(default_factory=dict)
    top_tokens: int = TOP_TOKENS

    @property
    def failed(self) -> list[Answered]:
        return [answer for row in self.answers for answer in row if not answer.ok]


def paired_answers(measured: Measured) -> dict[tuple[str, str], list[PairedAnswer]]:
    """Pairs by (mode, scope) of the questions that both answered and that have right answers."""
    found: dict[tuple[str, str], list[PairedAnswer]] = {key: list(pairs) for key, pairs in measured.pairs.items()}
    for reference, *others in measured.answers:
        for answer in others:
            if reference.ok and answer.ok and reference.right is not None and answer.right is not None:
                pair = PairedAnswer(reference.right, answer.right, answer.chance)
                for scope in answer.scopes:
                    found.setdefault((answer.mode, scope), []).append(pair)
    return found


def texts_by_scope(measured: Measured) -> dict[tuple[str, str], list[TextFidelity]]:
    """Texts by (mode, scope)."""
    found: dict[tuple[str, str], list[TextFidelity]] = {}
    for scopes, text in measured.texts:
        for scope in scopes:
            found.setdefault((text.mode, scope), []).append(text)
    return found


def all_evidence(measured: Measured, limits: Limits) -> list[QualityEvidence]:
    """Every metric of every mode and scope, accuracy first within one."""
    answers, texts = paired_answers(measured), texts_by_scope(measured)
    found = []
    for mode, scope in sorted({*answers, *texts}):
        if (mode, scope) in answers:
            found.append(accuracy_evidence(mode, scope, answers[mode, scope], limits))
        if (mode, scope) in texts:
            found.append(kl_evidence(mode, scope, [text.divergence for text in texts[mode, scope]], limits))
        if mode in measured.wanted:
            found.append(kl_evidence(mode, scope, measured.generated.get(mode, ()), limits, metric=GENERATED_KL))
    return found


def settled(found: Iterable[QualityEvidence]) -> list[QualityEvidence]:
    """One piece for each mode and scope: the one that decides. That of a mode's own answers must pass beside it."""
    groups: dict[tuple[str, str, bool], list[QualityEvidence]] = {}
    for item in found:
        groups.setdefault((item.mode, item.scope, item.metric == GENERATED_KL), []).append(item)
    return [settle(items) for items in groups.values()]


def likeness(measured: Measured) -> dict[str, dict[str, Interval]]:
    """By mode, what is told but not judged: likeness of generated text, and how text is read; means with intervals."""
    found: dict[str, dict[str, Interval]] = {}
    for mode, answers in _by_mode(measured).items():
        pairs = [(reference, answer) for reference, answer in answers if answer.rouge_fp16 is not None]
        rows = found.setdefault(mode, {})
        if pairs:
            rows["ROUGE-L to the reference mode"] = mean_interval([answer.rouge_fp16 or 0.0 for _, answer in pairs])
            rows["same greedy text"] = mean_interval([float(bool(answer.same_text)) for _, answer in pairs])
        known = [
            (answer.rouge_reference, reference.rouge_reference)
            for reference, answer in answers
            if answer.rouge_reference is not None and reference.rouge_reference is not None
        ]
        if known:
            rows["ROUGE-L to the right answer, change"] = mean_difference_interval(*map(list, zip(*known, strict=True)))
    by_mode: dict[str, list[TextFidelity]] = {}
    for _, text in measured.texts:
        by_mode.setdefault(text.mode, []).append(text)
    for mode, texts in by_mode.items():
        rows = found.setdefault(mode, {})
        rows["KL, nats/token"] = mean_interval([text.kl_nats for text in texts])
        rows["same most probable token"] = mean_interval([text.greedy_agreement for text in texts])
        rows["log perplexity ratio"] = mean_interval([log(text.perplexity_ratio) for text in texts])
        rows["|change of log-probability|"] = mean_interval([text.delta_logprob_abs for text in texts])
        rows["probability compared"] = mean_interval([text.covered for text in texts])
    return found


def _by_mode(measured: Measured) -> dict[str, list[tuple[Answered, Answered]]]:
    found: dict[str, list[tuple[Answered, Answered]]] = {}
    for reference, *others in measured.answers:
        for answer in others:
            if reference.ok and answer.ok:
                found.setdefault(answer.mode, []).append((reference, answer))
    return found


def accuracies(measured: Measured) -> dict[tuple[str, str], tuple[float, int]]:
    """(percent right, questions) by (suite, mode), of everything that was answered."""
    marks: dict[tuple[str, str], list[bool]] = {}
    for row in measured.answers:
        for answer in row:
            if answer.ok and answer.right is not None:
                marks.setdefault((answer.suite, answer.mode), []).append(answer.right)
    return {key: (100 * fmean(right), len(right)) for key, right in marks.items()}


def accuracy_table(found: Mapping[tuple[str, str], tuple[float, int]]) -> Table:
    """Suites down, modes across."""
    table = Table(title="Right answers, %")
    modes = list(dict.fromkeys(mode for _, mode in found))
    for name in ("suite", *modes):
        table.add_column(name, justify="left" if name == "suite" else "right")
    for suite in dict.fromkeys(suite for suite, _ in found):
        cells = (found.get((suite, mode)) for mode in modes)
        table.add_row(suite, *("" if cell is None else f"{cell[0]:.1f} ({cell[1]})" for cell in cells))
    return table


_COLOURS = {GateOutcome.PASS: "green", GateOutcome.FAIL: "red"}


def evidence_table(found: Sequence[QualityEvidence], limits: Limits) -> Table:
    """What was judged, with intervals."""
    table = Table(
        title=f"Quality against the reference: above -{limits.accuracy_drop_max_points:g} points, "
        f"or within {limits.kl_max_nats:g} nats of KL, passes"
    )
    figures = ("change", "95 % interval", "samples", "compared")
    for name in ("mode", "scope", "metric", *figures, "outcome"):
        table.add_column(name, justify="right" if name in figures else "left")
    for item in found:
        digits = 4 if item.metric in (KL, GENERATED_KL) else 2
        known = None not in (item.low, item.high)
        table.add_row(
            item.mode,
            item.scope,
            item.metric,
            "" if item.delta is None else f"{item.delta:.{digits}f}",
            f"{item.low:.{digits}f} to {item.high:.{digits}f}" if known else "unknown",
            str(item.samples),
            "" if item.covered is None else f"{100 * item.covered:.0f} %",
            item.outcome.value.replace("_", " "),
            style=_COLOURS.get(item.outcome),
        )
    return table


def likeness_table(found: Mapping[str, Mapping[str, Interval]]) -> Table:
    """Measures down, modes across."""
    table = Table(title="Likeness to the reference mode, mean [95 % interval]")
    table.add_column("")
    for mode in found:
        table.add_column(mode, justify="right")
    for name in dict.fromkeys(name for rows in found.values() for name in rows):
        table.add_row(name, *(rows[name].words(".4f") if name in rows else "" for rows in found.values()))
    return table


def summary(measured: Measured, limits: Limits, found: Sequence[QualityEvidence]) -> dict[str, Any]:
    """Everything but the answers themselves, for `summary.json`."""
    return {
        "evidence": [item.model_dump(mode="json") for item in settled(found)],
        "measured": [item.model_dump(mode="json") for item in found],
        "likeness": {
            mode: {name: _finite(interval) for name, interval in rows.items()}
            for mode, rows in likeness(measured).items()
        },
        "accuracy_pct": [
            {"suite": suite, "mode": mode, "right_pct": right, "questions": count}
            for (suite, mode), (right, count) in accuracies(measured).items()
        ],
        "failed_requests": len(measured.failed),
        "top_tokens": measured.top_tokens,
        "kl_meaning": kl_meaning(limits),
        "limits": {
            "accuracy_drop_max_points": limits.accuracy_drop_max_points,
            "kl_max_nats": limits.kl_max_nats,
            "kl_covered_min": limits.kl_covered_min,
            "bootstrap_samples_min": limits.bootstrap_samples_min,
        },
    }


def _finite(interval: Interval) -> dict[str, float | int | None]:
    one = interval.pairs == 1  # the ends are infinite, which JSON has not
    return {
        "mean": interval.estimate,
        "low": None if one else interval.low,
        "high": None if one else interval.high,
        "samples": interval.pairs,
    }
