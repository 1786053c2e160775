"""What a calibration measures, in which order, and how much of it its time allows. Pure: facts in, tasks out."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_ROUNDS = 2
"""A point that was measured once says nothing of the noise, so the grid is the richest that fits this often."""
_SAFETY = 1.25
_REQUEST_S = 0.1
"""Of a request apart from its tokens: the client, the HTTP server, the counters read before and after."""


class Text(StrEnum):
    """What decode steps are measured on. Only speculation cares: it wins where the output repeats the prompt."""

    FREE = "free"
    REWRITING = "rewriting"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to measure, and the mode that it is asked through."""

    name: str
    mode: str
    speculative: bool = False
    plain: str | None = None
    """The engine that differs by n-gram drafts alone: what they do not touch was measured on both."""

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(Text) if self.speculative else (Text.FREE,)


@dataclass(frozen=True, slots=True, order=True)
class PrefillTask:
    """One request of `tokens` prompt tokens and one output token, on an idle device."""

    engine: str
    tokens: int


@dataclass(frozen=True, slots=True, order=True)
class StepTask:
    """`batch` streams at once on one engine; the others are idle."""

    engine: str
    batch: int
    text: Text = Text.FREE


@dataclass(frozen=True, slots=True, order=True)
class TogetherTask:
    """One stream on each of two engines at once: gives the slowdown of both."""

    engine: str
    other: str


Task = PrefillTask | StepTask | TogetherTask


@dataclass(frozen=True, slots=True)
class Grid:
    """The points to measure: prompt lengths, batch sizes, and the output tokens of a stream."""

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    output_tokens: int


_LAST_RESORTS = (
    Grid((64, 256, 1024), (1, 2, 4, 8), 32),
    Grid((64, 256, 1024), (1, 4, 8), 24),
    Grid((64, 512), (1, 8), 16),
)
QUICK_GRIDS = (Grid((64, 256, 1024, 2048), (1, 2, 4, 8), 32), *_LAST_RESORTS)
FULL_GRIDS = (
    Grid((64, 128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16, 32), 64),
    Grid((64, 256, 512, 1024, 2048), (1, 2, 4, 8, 16, 32), 48),
    *QUICK_GRIDS,
)
"""Richest first."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A rough speed of the slowest engine, from its warm-up, for planning only."""

    prefill_tokens_per_s: float
    step_s: float


STEP_PROMPT_TOKENS: Mapping[Text, int] = {Text.FREE: 96, Text.REWRITING: 224}
"""About how long the prompts of decoding streams are."""


def expected_s(task: Task, grid: Grid, pace: Pace) -> float:
    """A guess at how long a task takes, rather too long than too short."""
    match task:
        case PrefillTask(tokens=tokens):
            return _REQUEST_S + tokens / pace.prefill_tokens_per_s
        case StepTask(batch=batch, text=text):
            prompts = batch * STEP_PROMPT_TOKENS[text] / pace.prefill_tokens_per_s
            # A batch of 8 takes about twice as long a step as a batch of 1 on two cores.
            return _REQUEST_S + prompts + grid.output_tokens * pace.step_s * (0.9 + 0.1 * batch)
        case TogetherTask():
            prompts = 2 * STEP_PROMPT_TOKENS[Text.FREE] / pace.prefill_tokens_per_s
            return _REQUEST_S + prompts + 2.5 * grid.output_tokens * pace.step_s


def tasks_of(engines: Sequence[Engine], grid: Grid) -> list[list[Task]]:
    """All tasks of one round. Those in one list differ in the engine alone, and are compared with one another."""
    groups: list[list[Task]] = [[PrefillTask(one.name, tokens) for one in engines] for tokens in grid.prompt_tokens]
    groups += [[StepTask(one.name, batch, text) for one in engines for text in one.texts] for batch in grid.batches]
    # Interference is a ratio to one stream alone, so it belongs beside it.
    groups += [
        [TogetherTask(one.name, other.name)] for place, one in enumerate(engines) for other in engines[place + 1 :]
    ]
    return groups


def round_s(engines: Sequence[Engine], grid: Grid, pace: Pace) -> float:
    """How long a round is expected to take."""
    return sum(expected_s(task, grid, pace) for group in tasks_of(engines, grid) for task in group)


def choose_grid(
    engines: Sequence[Engine], grids: Sequence[Grid], pace: Pace, budget_s: float, longest_tokens: int
) -> Grid:
    """The richest grid that fits `MIN_ROUNDS` times; the poorest where none does.

    longest_tokens: the model's context length, prompt and output together.
    """
    fitting = [_within(grid, longest_tokens) for grid in grids]
    for grid in fitting:
        if MIN_ROUNDS * _SAFETY * round_s(engines, grid, pace) <= budget_s:
            return grid
    return fitting[-1]


def _within(grid: Grid, longest_tokens: int) -> Grid:
    # A curve needs two lengths, whatever the context.
    prompts = tuple(tokens for tokens in grid.prompt_tokens if tokens < longest_tokens) or grid.prompt_tokens[:1]
    if len(prompts) < 2:
        prompts = (max(1, longest_tokens // 4), max(2, longest_tokens // 2))
    return Grid(prompts, grid.batches, grid.output_tokens)


def round_order(engines: Sequence[Engine], grid: Grid, number: int, seed: int) -> Iterator[Task]:
    """The tasks of round `number`: groups in random order, engines next to one another within each.

    So drift of the machine hits all engines alike, and none is always first.
    """
    rng = random.Random(f"calibration/{seed}/{number}")
    groups = tasks_of(engines, grid)
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
        yield from group
