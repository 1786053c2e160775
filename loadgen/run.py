"""`run`: a workload under an arrival process."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from loadgen.arrivals import RATE_SCHEDULES, Replayed
from loadgen.balloon import ENDED_EARLY, Balloon, BalloonRefused, balloon
from loadgen.client import OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.energy_facts import EnergySource
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.kv_use import WORKLOAD, pressure_words, watched_kv_use
from loadgen.options import ApiKey, finite
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.records import OutputUnwritable, RecordWriter, RequestRecord, rewrite_records
from loadgen.runner import Arrival, ClosedLoop, LoadRun, Manner, Progress
from loadgen.server_facts import NothingServed, engines, first_model, tokenizer_folder
from loadgen.servers import write_json
from loadgen.summary import RunSummary, Slo, counts_line, engines_table, rates_table, summarise_run, table_of
from loadgen.trace import TraceError, read_trace
from loadgen.workloads import Item, Mixture, trace_items

_WARMUP_CONCURRENCY = 4
# Warm-up prompts must not be those that are measured later.
_WARMUP_FIRST = 10**6
_LAST_LOOKS_S = 5.0
"""For the energy of a run that was interrupted: whoever stopped it waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What the command was asked for, checked."""

    base_url: str
    api_key: str | None
    model: str | None
    tokenizer: Path | None
    mixture: Mixture
    trace: Path | None
    length_scale: float
    arrival: Arrival | None  # None: at the times of the trace
    speed: float
    requests: int
    warmup: int
    stall_s: float
    include: str | None
    balloon_share: float | None
    out: Path

    @property
    def wants_pressure(self) -> bool:
        return self.trace is None and WORKLOAD in self.mixture.parts


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    warmup: Progress = dataclasses.field(default_factory=Progress)
    progress: Progress = dataclasses.field(default_factory=Progress)
    model: str | None = None
    caches_reset: bool | None = None
    engines: list[dict[str, Any]] | None = None
    energy: EnergySource = dataclasses.field(default_factory=lambda: EnergySource(False))
    kv_use: dict[str, float] = dataclasses.field(default_factory=dict)
    balloon: Balloon | None = None
    balloon_held: bool | None = None

    @property
    def peak_memory_bytes(self) -> dict[str, float | None]:
        """By engine, since it started; None where the server does not say it."""
        peaks = {str(state.get("name")): state.get("peak_memory_bytes") for state in self.engines or ()}
        return {name: float(peak) if isinstance(peak, int | float) else None for name, peak in peaks.items()}


async def _load(plan: Plan, manner: Manner, found: Found, console: Console) -> None:
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(plan.out))
        client = await stack.enter_async_context(
            OpenAIClient(plan.base_url, api_key=plan.api_key, stall_s=plan.stall_s, include=plan.include)
        )
        found.model = plan.model or await first_model(client)
        manner = dataclasses.replace(manner, model=found.model)
        maker = PromptMaker(ChatTokenizer.load(plan.tokenizer or await tokenizer_folder(client)))
        items, arrival = _items(plan, manner, maker)
        if plan.balloon_share is not None:
            with console.status("the balloon takes its memory"):
                found.balloon = await stack.enter_async_context(balloon(plan.balloon_share))
        warm_items = plan.mixture.items(maker, plan.warmup, manner.seed, _WARMUP_FIRST)
        warm = LoadRun(client, warm_items, manner, writer, warmup=True)
        run = LoadRun(client, items, manner, writer, warmup=False)
        found.warmup = warm.progress
        if warm_items:
            with console.status(f"{len(warm_items)} warm-up requests"):
                await warm.go(ClosedLoop(_WARMUP_CONCURRENCY))
        found.caches_reset = await client.reset_prefix_cache()
        found.progress = run.progress
        with Bar(console=console, transient=True, auto_refresh=False) as bar:
            run.on_record = _advance(bar, run.progress.planned)
            async with AsyncExitStack() as watching:
                if plan.wants_pressure:
                    found.kv_use = await watching.enter_async_context(watched_kv_use(client))
                try:
                    await run.go(arrival)
                except asyncio.CancelledError:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LAST_LOOKS_S):
                            await _look_up(client, found, console)
                    raise
        await _look_up(client, found, console)


async def _look_up(client: OpenAIClient, found: Found, console: Console) -> None:
    """What the server knows once requests are over: its engines, and the joules of each request."""
    found.balloon_held = None if found.balloon is None else found.balloon.holds
    found.engines = await engines(client)
    # Only this application keeps a record of each request, and only it lists engines.
    found.energy = EnergySource(offered=found.engines is not None)
    with console.status("the meter settles"):
        await found.energy.note_all(client, found.progress.records)


def _advance(bar: Bar, planned: int) -> Callable[[RequestRecord], None]:
    """Moves the bar once a second: a thread that draws it holds the interpreter while requests are due."""
    task = bar.add_task("requests", total=planned)
    ended, drawn_at = 0, time.perf_counter()

    def advance(record: RequestRecord) -> None:
        nonlocal ended, drawn_at
        ended += 1
        if time.perf_counter() - drawn_at > 1.0:
            bar.update(task, completed=ended, refresh=True)
            drawn_at = time.perf_counter()

    return advance


def _items(plan: Plan, manner: Manner, maker: PromptMaker) -> tuple[Sequence[Item], Arrival]:
    if plan.trace is None:
        assert plan.arrival is not None
        return plan.mixture.items(maker, plan.requests, manner.seed), plan.arrival
    rows = read_trace(plan.trace, limit=plan.requests)
    times_s = [row.time_s - rows[0].time_s for row in rows]
    return trace_items(rows, maker, manner.seed, plan.length_scale), plan.arrival or Replayed(times_s, plan.speed)


def by_workload(records: Sequence[RequestRecord], wall_s: float, slo: Slo) -> dict[str, RunSummary]:
    """All records together, then each workload when there are several."""
    names = sorted({record.workload for record in records})
    groups = {"all": summarise_run(records, wall_s, slo)}
    if len(names) > 1:
        for name in names:
            groups[name] = summarise_run([item for item in records if item.workload == name], wall_s, slo)
    return groups


def _report(plan: Plan, manner: Manner, slo: Slo, found: Found, interrupted: bool, console: Console) -> RunSummary:
    progress = found.progress
    groups = by_workload(progress.records, progress.wall_s, slo)
    total = groups["all"]
    console.print(table_of(groups))
    console.print(f"{counts_line(total, progress.planned)} in {total.wall_s:.1f} s", markup=False)
    console.print(rates_table(groups))
    if found.energy.method is not None:
        console.print(f"Joules above idle by {found.energy.method}, of {found.energy.scope}.", markup=False)
    if peaks := found.peak_memory_bytes:
        console.print(engines_table(peaks, found.kv_use))
    for warning in _warnings(plan, found, interrupted):
        console.print(warning, style="yellow", markup=False)
    for outcome, count in sorted(total.outcomes.items()):
        example = next((item.error for item in progress.records if str(item.outcome) == outcome and item.error), None)
        if example:
            console.print(f"{count} {outcome}, such as: {example}", style="yellow", markup=False)
    summary = {
        "command": "run",
        "interrupted": interrupted,
        "plan": {key: str(value) for key, value in dataclasses.asdict(plan).items() if key != "api_key"},
        "manner": dataclasses.asdict(manner) | {"model": found.model},
        "slo": dataclasses.asdict(slo),
        "caches_reset": found.caches_reset,
        "planned": progress.planned,
        "groups": {name: item.as_json() for name, item in groups.items()},
        "energy": {"method": found.energy.method, "scope": found.energy.scope},
        "peak_memory_bytes": found.peak_memory_bytes,
        "kv_use_peak": found.kv_use or None,
        "balloon": found.balloon and found.balloon.as_json(found.balloon_held),
        "engines": found.engines,
    }
    if any(record.energy_j is not None for record in progress.records):
        rewrite_records(plan.out / "requests.jsonl", [*found.warmup.records, *progress.records])
    write_json(plan.out / "summary.json", summary)
    console.print(f"{plan.out / 'requests.jsonl'} and {plan.out / 'summary.json'} hold the figures.", markup=False)
    return total


def _warnings(plan: Plan, found: Found, interrupted: bool) -> list[str]:
    """What keeps the figures from being what was asked for."""
    words = []
    if found.balloon_held is False:
        words.append(ENDED_EARLY)
    if plan.wants_pressure and not interrupted and (kv := pressure_words(found.kv_use)) is not None:
        words.append(kv)
    return words


def _mixture(text: str) -> Mixture:
    try:
        return Mixture.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from error


def _arrival(name: str, concurrency: int, rate_per_s: float, trace: Path | None) -> Arrival | None:
    if name == "trace":
        if trace is None:
            raise typer.BadParameter("needs --trace FILE", param_hint="--arrival trace")
        return None
    if name == "closed":
        return ClosedLoop(concurrency)
    if name not in RATE_SCHEDULES:
        raise typer.BadParameter(f"one of closed, trace, {', '.join(RATE_SCHEDULES)}", param_hint="--arrival")
    return RATE_SCHEDULES[name](rate_per_s)


def register(app: typer.Typer) -> None:
    """Adds `run`."""

    @app.command("run")
    def run(
        base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
        workload: Annotated[str, typer.Option(help="A name, `mixed`, or weights: ss=3,math=1.")] = "mixed",
        arrival: Annotated[str, typer.Option(help="closed, constant, poisson, bursty or trace.")] = "closed",
        requests: Annotated[int, typer.Option(min=1, help="Conversations to send.")] = 32,
        concurrency: Annotated[int, typer.Option(min=1, help="Of the closed loop.")] = 4,
        rate: Annotated[float, typer.Option(callback=finite, min=1e-6, help="Requests/s of an open loop.")] = 1.0,
        trace: Annotated[Path | None, typer.Option(help="Mooncake-style JSON lines.")] = None,
        speed: Annotated[
            float, typer.Option(callback=finite, min=1e-6, help="Plays the trace so many times as fast.")
        ] = 1.0,
        length_scale: Annotated[
            float, typer.Option(callback=finite, min=1e-6, help="Scales the trace's lengths.")
        ] = 1.0,
        model: Annotated[str | None, typer.Option(help="Model name to ask for; the first listed by default.")] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        stream: Annotated[bool, typer.Option(help="Ask for streams.")] = True,
        exact_output: Annotated[bool, typer.Option(help="Send vLLM's ignore_eos.")] = True,
        cancel_fraction: Annotated[
            float, typer.Option(callback=finite, min=0, max=1, help="Share to give up half-way.")
        ] = 0.0,
        warmup: Annotated[int, typer.Option(min=0, help="Requests beforehand, not counted.")] = 4,
        slo_ttft_ms: Annotated[float | None, typer.Option(callback=finite, help="Limit for goodput.")] = None,
        slo_between_tokens_ms: Annotated[float | None, typer.Option(callback=finite, help="Limit for goodput.")] = None,
        slo_total_ms: Annotated[float | None, typer.Option(callback=finite, help="Limit for goodput.")] = None,
        stall_s: Annotated[
            float, typer.Option(callback=finite, min=0.01, help="Longest silence of the server.")
        ] = 120.0,
        include: Annotated[str | None, typer.Option(help="Extra objects, as `mode,timing`.")] = None,
        balloon_share: Annotated[
            float | None,
            typer.Option(callback=finite, min=0.01, max=0.95, help="Hold this share of the GPU's memory meanwhile."),
        ] = None,
        api_key: ApiKey = None,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/run"),
        seed: int = 0,
    ) -> None:
        """Send a workload under an arrival process and measure what clients see."""
        console = results_console()
        if cancel_fraction and not stream:
            raise typer.BadParameter("only a stream can be given up half-way", param_hint="--cancel-fraction")
        slo = Slo(slo_ttft_ms, slo_between_tokens_ms, slo_total_ms)
        manner = Manner(model or "", stream, exact_output, cancel_fraction, seed)
        found = Found()
        try:
            plan = Plan(
                base_url,
                api_key,
                model,
                tokenizer,
                _mixture(workload),
                trace,
                length_scale,
                _arrival(arrival, concurrency, rate, trace),
                speed,
                requests,
                warmup,
                stall_s,
                include,
                balloon_share,
                out,
            )
            interrupted = run_interruptible(_load(plan, manner, found, console))
            total = _report(plan, manner, slo, found, interrupted, console)
        except (BalloonRefused, ServerFault, NothingServed, PromptError, TraceError, OutputUnwritable) as error:
            console.print(f"run: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if total.errors:
            raise typer.Exit(1)
