"""`sweep`: fixed modes x workloads x concurrency, interleaved, as ratios to the reference mode in the same rounds."""

import dataclasses
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loadgen.balloon import BalloonRefused, balloon
from loadgen.calibration_plan import Engine
from loadgen.calibration_trials import Calibrator
from loadgen.client import OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.decode_limit import decode_limits
from loadgen.energy_facts import EnergySource, tells_energy
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.options import ApiKey, finite
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.records import OutputUnwritable, RecordWriter
from loadgen.served_modes import engines_of, read_modes
from loadgen.server_facts import (
    NothingServed,
    engines,
    model_name,
    ready_modes,
    require_reference,
    served_name,
    tokenizer_folder,
)
from loadgen.servers import write_json
from loadgen.sweep_interference import BUDGET_SHARE, Interference, measure_interference
from loadgen.sweep_plan import Cell, Results, Stopping, next_round
from loadgen.sweep_report import Found, rows_of, summary_of, tables_of, warnings_of, words_of
from loadgen.sweep_trials import SweepTrials
from loadgen.workloads import WORKLOADS


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    api_key: str | None
    modes: list[str]
    reference: str
    cells: list[Cell]
    tokenizer: Path | None
    stopping: Stopping
    budget_s: float
    exact_output: bool
    interference: bool
    balloon_share: float | None
    out: Path
    seed: int


async def _measure(options: Options, found: Found, console: Console) -> None:
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.out))
        client = await stack.enter_async_context(OpenAIClient(options.base_url, api_key=options.api_key))
        found.modes = options.modes or await ready_modes(client)
        require_reference(options.reference, found.modes)
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(client)))
        served = await served_name(client)
        found.energy = EnergySource(await tells_energy(client, model_name(served, options.reference)))
        with console.status("what is served, and the memory bandwidth of this machine"):
            by_mode = await _engines_by_mode(options, client, found)
        if options.balloon_share is not None:
            with console.status("the balloon takes its memory"):
                found.balloon = await stack.enter_async_context(balloon(options.balloon_share))
        trials = SweepTrials(
            client,
            served,
            options.reference,
            maker,
            writer,
            found.energy,
            found.results,
            options.seed,
            options.exact_output,
            by_mode,
            found.limits,
        )
        for mode in found.modes:
            with console.status(f"warm-up of {mode}"):
                await trials.warm_up(options.cells[0], mode)
        engines_used = {engine.name: engine for engine in by_mode.values()}
        closing = options.interference and len(engines_used) > 1
        rounds_s = options.budget_s * (1 - BUDGET_SHARE if closing else 1)
        found.ended = await _rounds(options, found, trials, began + rounds_s, console)
        if closing:
            found.interference = Interference()
            # Its joules are asked for by nobody.
            calibrator = Calibrator(client, served, engines_used, maker, EnergySource(False), seed=options.seed)
            await measure_interference(calibrator, found.interference, began + options.budget_s, options.seed, console)
            found.states = await engines(client)


async def _engines_by_mode(options: Options, client: OpenAIClient, found: Found) -> dict[str, Engine]:
    """The engine of each measured mode, with its memory limit in `found`; empty where the server does not tell."""
    try:
        overview = await client.get_json("/v1/modes")
    except ServerFault:
        return {}
    modes = [mode for mode in read_modes(overview) if mode.name in found.modes]
    by_name = {engine.name: engine for engine in engines_of(modes)}
    found.engine_of = {mode.name: mode.engine for mode in modes}
    found.states = overview.get("engines")
    if any(cell.concurrency == 1 for cell in options.cells):
        limits = decode_limits([state for state in found.states or () if state.get("name") in by_name])
        found.limits = {mode: limits[engine] for mode, engine in found.engine_of.items() if engine in limits}
    return {mode: by_name[engine] for mode, engine in found.engine_of.items()}


async def _rounds(options: Options, found: Found, trials: SweepTrials, deadline: float, console: Console) -> str:
    """Rounds until all is known well enough; returns why they ended. After each, what there is is written."""
    number = 0
    while work := list(next_round(found.results, options.cells, found.modes, options.stopping, number, options.seed)):
        for cell, order in work:
            # The first round is made whole in any case: it alone has all cells.
            if number and time.perf_counter() > deadline:
                return "the budget of time ended"
            await trials.cell(cell, order, number, console)
        found.states = await engines(trials.client)
        found.balloon_held = None if found.balloon is None else found.balloon.holds
        _write(options, found)
        number += 1
    return "every interval is narrow enough" if number < options.stopping.max_rounds else "the rounds ended"


def _write(options: Options, found: Found) -> list[dict[str, Any]]:
    rows = rows_of(found)
    write_json(options.out / "sweep.json", summary_of(found, rows, dataclasses.asdict(options)))
    return rows


def _report(options: Options, found: Found, console: Console) -> None:
    rows = _write(options, found)
    for table in tables_of(found, rows):
        console.print(table)
    for sentence in words_of(found, rows):
        console.print(sentence, markup=False)
    for warning in warnings_of(found, rows):
        console.print(warning, style="yellow", markup=False)
    for failure in found.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    console.print(f"{options.out / 'sweep.json'} and {options.out / 'requests.jsonl'} hold the figures.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `sweep`."""

    @app.command()
    def sweep(
        base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
        api_key: ApiKey = None,
        mode: Annotated[
            list[str] | None,
            typer.Option(help="Modes; all that are ready by default. At a server without modes, models."),
        ] = None,
        reference: Annotated[str, typer.Option(help="The mode that ratios are to.")] = "fp16",
        workload: Annotated[list[str] | None, typer.Option(help="Workloads; ss, sl, ls, ll by default.")] = None,
        concurrency: Annotated[
            list[int] | None, typer.Option(min=1, help="Streams at once; 1 and 8 by default.")
        ] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        tolerance: Annotated[
            float, typer.Option(callback=finite, min=0.001, help="Half-width of the interval that is enough.")
        ] = 0.05,
        min_rounds: Annotated[int, typer.Option(min=2)] = 3,
        max_rounds: Annotated[int, typer.Option(min=1)] = 20,
        budget_s: Annotated[
            float,
            typer.Option(callback=finite, min=1.0, help="But for the first round, nothing begins after this time."),
        ] = 1800.0,
        exact_output: Annotated[bool, typer.Option(help="Send vLLM's ignore_eos.")] = True,
        interference: Annotated[bool, typer.Option(help="At the end, time each pair of engines at once.")] = True,
        balloon_share: Annotated[
            float | None,
            typer.Option(callback=finite, min=0.01, max=0.95, help="Hold this share of the GPU's memory meanwhile."),
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/sweep"),
        seed: int = 0,
    ) -> None:
        """Measure every mode on every workload and concurrency, until the intervals are narrow or the budget ends."""
        console = results_console()
        workloads = workload or ["ss", "sl", "ls", "ll"]
        if unknown := [name for name in workloads if name not in WORKLOADS]:
            raise typer.BadParameter(f"no workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
        cells = [Cell(name, streams) for name in workloads for streams in concurrency or [1, 8]]
        stopping = Stopping(tolerance, min_rounds, max_rounds)
        options = Options(
            base_url,
            api_key,
            mode or [],
            reference,
            cells,
            tokenizer,
            stopping,
            budget_s,
            exact_output,
            interference,
            balloon_share,
            out,
            seed,
        )
        found = Found(Results(reference))
        try:
            interrupted = run_interruptible(_measure(options, found, console))
            _report(options, found, console)
        except (BalloonRefused, ServerFault, NothingServed, PromptError, OutputUnwritable) as error:
            console.print(f"sweep: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if found.failures:
            raise typer.Exit(1)
