"""What one side of the overhead comparison is asked to do, and what is read off its answers."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, permutations

from loadgen.client import Call, OpenAIClient
from loadgen.prompts import Frame, PromptMaker
from loadgen.records import Outcome, RecordWriter, RequestRecord
from loadgen.statistics import percentile

APP, BARE, CONTROL = "app", "bare", "control"
SERIES = (BARE, APP, CONTROL)

# A frame gap below the clock's noise would make a ratio meaningless.
_SMALLEST_GAP_MS = 0.01


@dataclass(frozen=True, slots=True)
class Side:
    """A server under test and the model name that pins it to one engine."""

    client: OpenAIClient
    model: str


class TrialFailed(Exception):
    """A request of a trial failed, so that its round tells nothing; the message has the client's words."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial showed: so many streams, sent together."""

    tokens_per_s: float
    ttft_ms: float
    frame_gap_p95_ms: float
    frames_per_token: float


@dataclass(slots=True)
class Rounds:
    """Results by (streams at once, series), one value per complete round; failures in words."""

    trials: dict[tuple[int, str], list[Trial]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, streams: int, results: dict[str, Trial]) -> None:
        for series, trial in results.items():
            self.trials.setdefault((streams, series), []).append(trial)

    def values(self, streams: int, series: str, pick: Callable[[Trial], float]) -> list[float]:
        return [pick(trial) for trial in self.trials.get((streams, series), [])]


def orders() -> Iterator[tuple[str, ...]]:
    """Every order of the series in turn: each comes equally often first, last, and right after each other one."""
    return cycle(permutations(SERIES))


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Runs trials; every prompt is new, so that no prefix cache helps either side."""

    maker: PromptMaker
    streams: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    settle_s: float
    writer: RecordWriter
    seed: int

    async def round(self, number: int, order: tuple[str, ...], sides: dict[str, Side], results: Rounds) -> None:
        """One round of each number of streams. Only one side is busy at any time, and both rest before each trial."""
        for streams in self.streams:
            found: dict[str, Trial] = {}
            try:
                for series in order:
                    await asyncio.sleep(self.settle_s)
                    found[series] = await self._trial(streams, series, sides[series], number)
            except TrialFailed as failure:
                results.failures.append(f"round {number}, {streams} streams, {failure}")
                continue
            results.add(streams, found)

    async def _trial(self, streams: int, series: str, side: Side, number: int) -> Trial:
        calls = [
            self._call(side.model, f"{self.seed}/{number}/{streams}/{series}/{stream}") for stream in range(streams)
        ]
        start = time.perf_counter()
        records = await asyncio.gather(*(side.client.send(call) for call in calls))
        wall_s = time.perf_counter() - start
        for record in records:
            record.workload, record.turn, record.warmup = f"{streams}:{series}", number, number < 0
            self.writer.write(record)
        return read_trial(records, wall_s, series)

    def _call(self, model: str, seed: str) -> Call:
        rng = random.Random(seed)
        frame = Frame(head=f"Text {rng.randrange(10**9)}:")
        return Call.of(
            {
                "model": model,
                "messages": self.maker.exact(frame, self.prompt_tokens, rng),
                "max_tokens": self.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
        )


def read_trial(records: list[RequestRecord], wall_s: float, series: str) -> Trial:
    """Figures of a trial. wall_s: from the first send to the last end. Raises TrialFailed."""
    for record in records:
        if record.outcome is not Outcome.OK:
            raise TrialFailed(f"{series}: {record.outcome}: {record.error}")
        if record.ttft_ms is None or not record.output_tokens or len(record.frame_ms) < 2:
            raise TrialFailed(f"{series}: {len(record.frame_ms)} frames and {record.output_tokens} tokens to time")
    tokens = sum(record.output_tokens or 0 for record in records)
    gaps = [gap for record in records for gap in record.frame_gaps_ms]
    return Trial(
        tokens_per_s=tokens / wall_s,
        ttft_ms=sum(record.ttft_ms or 0.0 for record in records) / len(records),
        frame_gap_p95_ms=max(percentile(gaps, 95), _SMALLEST_GAP_MS),
        frames_per_token=sum(len(record.frame_ms) for record in records) / tokens,
    )
