"""What a sweep measures next and when it has measured enough. Pure: results in, trials out."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loadgen.records import Outcome, RequestRecord
from loadgen.statistics import Interval, paired_bootstrap, summarise, total


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A workload at a concurrency."""

    workload: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One mode in one cell in one round: means over its requests. Unknown is None.

    j_per_token: joules above idle per output token of all its requests together.
    bandwidth_share: decode steps per s as a part of what reading the weights allows; of one stream only.
    rouge_l, same_text: ROUGE-L F to the reference mode's greedy text for the same prompt, and the part of prompts whose
    texts are the very same, both 0 to 1; None where prompts differed, and for the reference itself.
    kv_use: the fullest that the KV cache of the mode's engine was, 0 to 1; watched where memory is to be short.
    """

    latency_ms: float
    ttft_ms: float | None
    between_tokens_ms: float | None
    tokens_per_s: float | None
    j_per_token: float | None = None
    bandwidth_share: float | None = None
    rouge_l: float | None = None
    same_text: float | None = None
    kv_use: float | None = None


Quantity = Callable[[TrialResult], float | None]

QUANTITIES: dict[str, Quantity] = {
    "latency": lambda trial: trial.latency_ms,
    "ttft": lambda trial: trial.ttft_ms,
    "between_tokens": lambda trial: trial.between_tokens_ms,
    "tokens_per_s": lambda trial: trial.tokens_per_s,
    "j_per_token": lambda trial: trial.j_per_token,
    "bandwidth_share": lambda trial: trial.bandwidth_share,
}
"""What is told as a ratio to the reference."""
LIKENESS: dict[str, Quantity] = {
    "rouge_l": lambda trial: trial.rouge_l,
    "same_text": lambda trial: trial.same_text,
}
"""What compares with the reference already, so it is told as a mean."""
STOPPING_QUANTITY = "latency"


class TrialSpoilt(Exception):
    """A trial in which a request failed; the message has the client's words."""


def read_trial(records: Sequence[RequestRecord], wall_s: float) -> TrialResult:
    """Figures of one trial's records. Raises TrialSpoilt when any of them failed, or when there is none."""
    bad = next((record for record in records if record.outcome is not Outcome.OK), None)
    if bad is not None or not records:
        raise TrialSpoilt(f"{bad.outcome}: {bad.error}" if bad else "no request was sent")
    tokens = total(record.output_tokens for record in records)
    return TrialResult(
        latency_ms=_mean([record.total_ms for record in records]) or 0.0,
        ttft_ms=_mean([record.ttft_ms for record in records]),
        between_tokens_ms=_mean([record.between_tokens_ms for record in records]),
        tokens_per_s=None if tokens is None else tokens / wall_s,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    found = summarise(known)
    return found.mean if found and len(known) == len(values) else None


@dataclass(slots=True)
class Results:
    """Trials by cell, then mode, then round: only trials of one round are ever compared."""

    reference: str
    trials: dict[Cell, dict[str, dict[int, TrialResult]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, cell: Cell, mode: str, number: int, trial: TrialResult) -> None:
        self.trials.setdefault(cell, {}).setdefault(mode, {})[number] = trial

    def values(self, cell: Cell, mode: str, of: Quantity) -> list[float]:
        """Of the trials that know it, by round."""
        trials = self.trials.get(cell, {}).get(mode, {})
        return [value for _, trial in sorted(trials.items()) if (value := of(trial)) is not None]

    def ratio(self, cell: Cell, mode: str, quantity: str) -> Interval | None:
        """`mode` against the reference in the same rounds; None without a round that has both."""
        by_mode, of = self.trials.get(cell, {}), QUANTITIES[quantity]
        ours, reference = by_mode.get(mode, {}), by_mode.get(self.reference, {})
        pairs = [
            (left, right)
            for number in sorted(ours.keys() & reference.keys())
            if (left := of(ours[number])) and (right := of(reference[number]))
        ]
        return paired_bootstrap([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else None


@dataclass(frozen=True, slots=True)
class Stopping:
    """A mode is done in a cell when the interval of its latency ratio is within +-tolerance of the estimate.

    The bootstrap of a few rounds is too narrow by luck, so `min_rounds` come first in any case.
    """

    tolerance: float = 0.05
    min_rounds: int = 3
    max_rounds: int = 20

    def done(self, found: Interval | None) -> bool:
        if found is None or found.pairs < self.min_rounds:
            return False
        return max(found.high - found.estimate, found.estimate - found.low) <= self.tolerance * found.estimate


def next_round(
    results: Results, cells: Sequence[Cell], modes: Sequence[str], stopping: Stopping, number: int, seed: int
) -> Iterator[tuple[Cell, list[str]]]:
    """Cells that are not done, each with the modes still to measure and the reference, in a fresh random order."""
    if number >= stopping.max_rounds:
        return
    for cell in cells:
        open_modes = [
            mode
            for mode in modes
            if mode != results.reference and not stopping.done(results.ratio(cell, mode, STOPPING_QUANTITY))
        ]
        if open_modes or (number < stopping.min_rounds and list(modes) == [results.reference]):
            order = [results.reference, *open_modes]
            random.Random(f"{seed}/{number}/{cell.workload}/{cell.concurrency}").shuffle(order)
            yield cell, order
