"""`sweep`: fixed modes x workloads x concurrency, interleaved, as ratios to the reference mode in the same rounds."""

import dataclasses
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadgen.client import OpenAIClient, ServerFault
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.records import OutputUnwritable, RecordWriter
from loadgen.runner import ClosedLoop, LoadRun, Manner
from loadgen.server_facts import NothingServed, engines, first_model, ready_modes, tokenizer_folder
from loadgen.servers import write_json
from loadgen.statistics import summarise
from loadgen.sweep_plan import QUANTITIES, Cell, Results, Stopping, TrialResult, TrialSpoilt, next_round, read_trial
from loadgen.workloads import WORKLOADS

# Waves of a trial: enough that a stream's start and end do not make the whole of it.
_REQUESTS_PER_STREAM = 2
_WARMUP_FIRST = 10**6


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    modes: list[str]
    reference: str
    cells: list[Cell]
    tokenizer: Path | None
    stopping: Stopping
    budget_s: float
    exact_output: bool
    out: Path
    seed: int


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    results: Results
    modes: list[str] = dataclasses.field(default_factory=list)
    ended: str = "interrupted"
    engines: Any = None


@dataclasses.dataclass(slots=True)
class _Sweep:
    """The running sweep: one trial at a time, so that modes do not disturb one another."""

    options: Options
    client: OpenAIClient
    served: str
    maker: PromptMaker
    writer: RecordWriter
    found: Found

    async def trial(self, cell: Cell, mode: str, number: int) -> TrialResult:
        """One mode in one cell. All modes get equal prompts in a round where caches can be emptied, else their own."""
        was_reset = await self.client.reset_prefix_cache()
        count = cell.concurrency * _REQUESTS_PER_STREAM
        seed = self.options.seed if was_reset else zlib.crc32(f"{self.options.seed}/{mode}".encode())
        workload = WORKLOADS[cell.workload]
        first = (number if number >= 0 else _WARMUP_FIRST) * count
        items = [workload.item(self.maker, seed, first + index) for index in range(count)]
        manner = Manner(f"{self.served}:{mode}", exact_output=self.options.exact_output, seed=self.options.seed)
        load = LoadRun(self.client, items, manner, self.writer, warmup=number < 0)
        await load.go(ClosedLoop(cell.concurrency))
        return read_trial(load.progress.records, load.progress.wall_s)

    async def round(self, number: int, work: Sequence[tuple[Cell, list[str]]], console: Console) -> None:
        for cell, order in work:
            for mode in order:
                with console.status(f"round {number + 1}: {cell.workload} x {cell.concurrency}, {mode}"):
                    try:
                        self.found.results.add(cell, mode, number, await self.trial(cell, mode, number))
                    except TrialSpoilt as spoilt:
                        self.found.results.failures.append(f"round {number + 1}, {cell}, {mode}: {spoilt}")


async def _measure(options: Options, found: Found, console: Console) -> None:
    deadline = time.perf_counter() + options.budget_s
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.out))
        client = await stack.enter_async_context(OpenAIClient(options.base_url))
        found.modes = options.modes or await ready_modes(client)
        if options.reference not in found.modes:
            raise NothingServed(f"the reference mode {options.reference!r} is not among: {', '.join(found.modes)}")
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(client)))
        sweep = _Sweep(options, client, await first_model(client), maker, writer, found)
        for mode in found.modes:
            with console.status(f"warm-up of {mode}"):
                await _warm_up(sweep, options.cells[0], mode)
        number = 0
        while work := list(
            next_round(found.results, options.cells, found.modes, options.stopping, number, options.seed)
        ):
            if time.perf_counter() > deadline:
                found.ended = "the budget of time ended"
                break
            await sweep.round(number, work, console)
            number += 1
        else:
            found.ended = (
                "every interval is narrow enough" if number < options.stopping.max_rounds else "the rounds ended"
            )
        found.engines = await engines(client)


async def _warm_up(sweep: _Sweep, cell: Cell, mode: str) -> None:
    try:
        await sweep.trial(cell, mode, -1)
    except TrialSpoilt as spoilt:
        sweep.found.results.failures.append(f"warm-up, {mode}: {spoilt}")


def rows_of(found: Found) -> list[dict[str, Any]]:
    """One row per cell and mode: medians of the trials, and ratios to the reference with their intervals."""
    rows = []
    for cell, by_mode in sorted(found.results.trials.items()):
        for mode, trials in by_mode.items():
            row: dict[str, Any] = {"workload": cell.workload, "concurrency": cell.concurrency, "mode": mode}
            for name, of in QUANTITIES.items():
                middle = summarise([value for trial in trials.values() if (value := of(trial)) is not None])
                ratio = found.results.ratio(cell, mode, name)
                row[name] = {
                    "median": None if middle is None else middle.p50,
                    "ratio": None if ratio is None else ratio._asdict(),
                }
            rows.append(row)
    return rows


def _table(found: Found) -> Table:
    table = Table(title=f"Ratios to {found.results.reference} in the same rounds [95 %]")
    for name in ("workload", "at once", "mode", "latency", "TTFT", "between tokens", "tokens/s", "rounds"):
        table.add_column(name, justify="left" if name in ("workload", "mode") else "right")
    for cell, by_mode in sorted(found.results.trials.items()):
        for mode, trials in by_mode.items():
            ratios = (found.results.ratio(cell, mode, name) for name in QUANTITIES)
            words = ("" if ratio is None else ratio.words() for ratio in ratios)
            table.add_row(cell.workload, str(cell.concurrency), mode, *words, str(len(trials)))
        table.add_section()
    return table


def _report(options: Options, found: Found, console: Console) -> None:
    console.print(_table(found))
    console.print(f"ended: {found.ended}")
    for failure in found.results.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    summary = {
        "command": "sweep",
        "reference": found.results.reference,
        "ended": found.ended,
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
        "rows": rows_of(found),
        "failures": found.results.failures,
        "engines": found.engines,
    }
    write_json(options.out / "sweep.json", summary)
    console.print(f"{options.out / 'sweep.json'} and {options.out / 'requests.jsonl'} hold the figures.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `sweep`."""

    @app.command()
    def sweep(
        base_url: Annotated[str, typer.Option(help="This application.")] = "http://127.0.0.1:8000",
        mode: Annotated[list[str] | None, typer.Option(help="Modes; all that are ready by default.")] = None,
        reference: Annotated[str, typer.Option(help="The mode that ratios are to.")] = "fp16",
        workload: Annotated[list[str] | None, typer.Option(help="Workloads; ss, sl, ls, ll by default.")] = None,
        concurrency: Annotated[
            list[int] | None, typer.Option(min=1, help="Streams at once; 1 and 8 by default.")
        ] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        tolerance: Annotated[float, typer.Option(min=0.001, help="Half-width of the interval that is enough.")] = 0.05,
        min_rounds: Annotated[int, typer.Option(min=2)] = 3,
        max_rounds: Annotated[int, typer.Option(min=1)] = 20,
        budget_s: Annotated[float, typer.Option(min=1.0, help="No round begins after this time.")] = 1800.0,
        exact_output: Annotated[bool, typer.Option(help="Send vLLM's ignore_eos.")] = True,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/sweep"),
        seed: int = 0,
    ) -> None:
        """Measure every mode on every workload and concurrency, until the intervals are narrow or the budget ends."""
        console = Console()
        workloads = workload or ["ss", "sl", "ls", "ll"]
        if unknown := [name for name in workloads if name not in WORKLOADS]:
            raise typer.BadParameter(f"no workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
        cells = [Cell(name, streams) for name in workloads for streams in concurrency or [1, 8]]
        stopping = Stopping(tolerance, min_rounds, max_rounds)
        options = Options(
            base_url, mode or [], reference, cells, tokenizer, stopping, budget_s, exact_output, out, seed
        )
        found = Found(Results(reference))
        try:
            interrupted = run_interruptible(_measure(options, found, console))
        except (ServerFault, NothingServed, PromptError, OutputUnwritable) as error:
            console.print(f"sweep: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        _report(options, found, console)
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if found.results.failures:
            raise typer.Exit(1)
