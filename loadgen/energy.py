"""`energy`: J per token of every mode, from a small fixed workload sent to each in turn."""

import asyncio
import random
import time
import zlib
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.client import OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.energy_by_mode import Results, Spent, accounts, j_per_token, rows, table_of
from loadgen.energy_facts import INCLUDE, EnergySource, offers_energy
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.options import ApiKey
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.records import Outcome, OutputUnwritable, RecordWriter, RequestRecord
from loadgen.runner import ClosedLoop, LoadRun, Manner
from loadgen.server_facts import (
    NothingServed,
    model_name,
    ready_modes,
    require_reference,
    served_name,
    tokenizer_folder,
)
from loadgen.servers import write_json
from loadgen.workloads import WORKLOADS

_WARMUP = -1
_FIRST_OF_WARMUP = 10**6
_FLUSH_S = 2.5
"""The meter writes its account every two seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    api_key: str | None
    modes: list[str]
    reference: str
    workload: str
    requests: int
    concurrency: int
    rounds: int
    tokenizer: Path | None
    exact_output: bool
    out: Path
    seed: int


@dataclass(slots=True)
class _Measurement:
    """The running measurement: one mode at a time, since idle power is shared by whoever runs."""

    options: Options
    client: OpenAIClient
    served: str
    source: EnergySource
    maker: PromptMaker
    writer: RecordWriter
    results: Results

    async def trial(self, mode: str, number: int) -> None:
        """One mode in one round. All modes get equal prompts where caches can be emptied, else each its own."""
        options = self.options
        was_reset = await self.client.reset_prefix_cache()
        seed = options.seed if was_reset else zlib.crc32(f"{options.seed}/{mode}".encode())
        first = _FIRST_OF_WARMUP if number == _WARMUP else number * options.requests
        workload = WORKLOADS[options.workload]
        items = [workload.item(self.maker, seed, first + index) for index in range(options.requests)]
        manner = Manner(model_name(self.served, mode), exact_output=options.exact_output, seed=options.seed)
        load = LoadRun(self.client, items, manner, self.writer, warmup=number == _WARMUP)
        await load.go(ClosedLoop(options.concurrency))
        if number != _WARMUP:
            await self._count(mode, number, load.progress.records)

    async def _count(self, mode: str, number: int, records: list[RequestRecord]) -> None:
        bad = next((record for record in records if record.outcome is not Outcome.OK), None)
        if bad is not None:
            self.results.failures.append(f"round {number + 1}, {mode}: {bad.outcome}: {bad.error}")
            return
        self.source.method = self.source.scope = None
        spent = [Spent(await self.source.joules(self.client, record), record.output_tokens) for record in records]
        self.results.add(mode, number, j_per_token(spent), self.source.method, self.source.scope)


async def _measure(options: Options, results: Results, console: Console) -> None:
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.out))
        asker = await stack.enter_async_context(OpenAIClient(options.base_url, api_key=options.api_key))
        modes = options.modes or await ready_modes(asker)
        require_reference(options.reference, modes)
        results.trials = {mode: {} for mode in modes}
        served = await served_name(asker)
        source = EnergySource(await offers_energy(asker, model_name(served, modes[0])))
        include = INCLUDE if source.offered else None
        client = await stack.enter_async_context(
            OpenAIClient(options.base_url, api_key=options.api_key, include=include)
        )
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(asker)))
        measurement = _Measurement(options, client, served, source, maker, writer, results)
        for mode in modes:
            with console.status(f"warm-up of {mode}"):
                await measurement.trial(mode, _WARMUP)
        begin_s = time.time()
        for number in range(options.rounds):
            order = random.Random(f"{options.seed}/{number}").sample(modes, len(modes))
            for mode in order:
                with console.status(f"round {number + 1} of {options.rounds}: {mode}"):
                    await measurement.trial(mode, number)
        await asyncio.sleep(_FLUSH_S)
        try:
            results.accounts = accounts(await asker.get_json(f"/v1/energy?since={begin_s:.3f}&until={time.time():.3f}"))
        except ServerFault as fault:
            console.print(f"the server shows no account of energy: {fault}", style="yellow", markup=False)


def _report(options: Options, results: Results, console: Console) -> None:
    found = rows(results, options.reference)
    console.print(table_of(found, options.reference))
    for scope in dict.fromkeys(row.scope for row in found if row.scope):
        console.print(f"What is measured: {scope}.", markup=False)
    if any(row.modelled for row in found):
        console.print("Modelled: these joules come from a model of the device's power, no meter measured them.")
    if any(row.j_per_token is None for row in found):
        console.print("Unknown: the server told no joules for some request of every round.")
    for failure in results.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    path = options.out / "energy.json"
    summary = {
        "command": "energy",
        "reference": options.reference,
        "options": {name: str(value) for name, value in asdict(options).items() if name != "api_key"},
        "rows": [row.as_json() for row in found],
        "failures": results.failures,
    }
    write_json(path, summary)
    console.print(f"{path} and {options.out / 'requests.jsonl'} hold the figures.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `energy`."""

    @app.command()
    def energy(
        base_url: Annotated[str, typer.Option(help="This application.")] = "http://127.0.0.1:8000",
        mode: Annotated[list[str] | None, typer.Option(help="Modes; all that are ready by default.")] = None,
        reference: Annotated[str, typer.Option(help="The mode that ratios are to.")] = "fp16",
        workload: Annotated[str, typer.Option(help="Of one kind.")] = "ss",
        requests: Annotated[int, typer.Option(min=1, help="Per mode and round.")] = 2,
        concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 1,
        rounds: Annotated[int, typer.Option(min=1, help="Each sends to every mode, in a new order.")] = 5,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        api_key: ApiKey = None,
        exact_output: Annotated[bool, typer.Option(help="Send vLLM's ignore_eos.")] = True,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/energy"),
        seed: int = 0,
    ) -> None:
        """Joules per output token by mode, with the method that measured them, or `unknown`."""
        console = results_console()
        if workload not in WORKLOADS:
            raise typer.BadParameter(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}")
        options = Options(
            base_url,
            api_key,
            mode or [],
            reference,
            workload,
            requests,
            concurrency,
            rounds,
            tokenizer,
            exact_output,
            out,
            seed,
        )
        results = Results()
        try:
            interrupted = run_interruptible(_measure(options, results, console))
            _report(options, results, console)
        except (ServerFault, NothingServed, PromptError, OutputUnwritable) as error:
            console.print(f"energy: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if results.failures:
            raise typer.Exit(1)
