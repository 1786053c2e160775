"""`overhead`: what this application costs on top of vLLM's own server, both up, interleaved in one run."""

import dataclasses
import os
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loadgen.bare_server import EngineDescription, EngineUnknown, describe_engine
from loadgen.client import OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.options import ApiKey, finite
from loadgen.overhead_report import compare, table_of
from loadgen.overhead_trials import APP, BARE, CONTROL, Rounds, Side, TrialRunner, orders
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.records import OutputUnwritable, RecordWriter
from loadgen.server_facts import NothingServed, first_model
from loadgen.servers import (
    StartFailed,
    answers,
    free_port,
    mode_ready,
    one_mode_config,
    running,
    serve_command,
    write_json,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    api_key: str | None
    mode: str
    serve_config: Path
    bare_url: str | None
    bare_command: str | None
    bare_env: list[str]
    tokenizer: Path | None
    streams: tuple[int, ...]
    rounds: int
    warmup_rounds: int
    prompt_tokens: int
    output_tokens: int
    settle_s: float
    start_timeout_s: float
    out: Path
    seed: int


@dataclasses.dataclass(slots=True)
class Run:
    """What has been found so far; kept outside of the coroutine, so that an interruption loses nothing."""

    rounds: Rounds = dataclasses.field(default_factory=Rounds)
    engine: EngineDescription | None = None
    bare_command: list[str] | None = None
    load_averages: list[float] = dataclasses.field(default_factory=list)


async def _measure(options: Options, run: Run, console: Console) -> None:
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.out))
        app = await stack.enter_async_context(OpenAIClient(options.base_url, api_key=options.api_key))
        await _ensure_app(stack, app, options, console)
        served = await first_model(app)
        run.engine = describe_engine(await app.get_json("/v1/modes"), options.mode)
        folder = options.tokenizer or Path(str(run.engine.engine_args.get("model", "")))
        maker = PromptMaker(ChatTokenizer.load(folder))
        bare = await _ensure_bare(stack, run, served, options, console)
        # A series of its own on the same bare server, over a client of its own: the measurement against itself.
        control = await stack.enter_async_context(OpenAIClient(bare.base_url))
        bare_model = await first_model(bare)
        sides = {
            APP: Side(app, f"{served}:{options.mode}"),
            BARE: Side(bare, bare_model),
            CONTROL: Side(control, bare_model),
        }
        runner = TrialRunner(
            maker,
            options.streams,
            options.prompt_tokens,
            options.output_tokens,
            options.settle_s,
            writer,
            options.seed,
        )
        order = orders()
        for number in range(-options.warmup_rounds, options.rounds):
            label = f"warm-up round {number + options.warmup_rounds + 1} of {options.warmup_rounds}"
            with console.status(label if number < 0 else f"round {number + 1} of {options.rounds}"):
                await runner.round(number, next(order), sides, Rounds() if number < 0 else run.rounds)
            run.load_averages.append(os.getloadavg()[0])


async def _ensure_app(stack: AsyncExitStack, app: OpenAIClient, options: Options, console: Console) -> None:
    if await answers(app):
        return
    config = one_mode_config(options.serve_config, options.mode, options.out)
    console.print(f"nothing answers at {options.base_url}: starting it with {config}")
    with console.status("the application starts"):
        await stack.enter_async_context(
            running(
                serve_command(config),
                os.environ,
                options.out / "app.log",
                lambda: mode_ready(app, options.mode),
                options.start_timeout_s,
            )
        )


async def _ensure_bare(
    stack: AsyncExitStack, run: Run, served: str, options: Options, console: Console
) -> OpenAIClient:
    if options.bare_url:
        return await stack.enter_async_context(OpenAIClient(options.bare_url))
    assert run.engine is not None
    port = free_port()
    command, env = run.engine.command(port, served), run.engine.environment()
    if options.bare_command:
        command = [*shlex.split(options.bare_command), "--host", "127.0.0.1", "--port", str(port)]
    env |= dict(pair.split("=", 1) for pair in options.bare_env)
    run.bare_command = command
    console.print(f"bare server: {shlex.join(command)}")
    bare = await stack.enter_async_context(OpenAIClient(f"http://127.0.0.1:{port}"))
    with console.status("vLLM's own server starts"):
        await stack.enter_async_context(
            running(command, env, options.out / "bare.log", lambda: answers(bare), options.start_timeout_s)
        )
    return bare


def _report(options: Options, run: Run, interrupted: bool, console: Console) -> None:
    comparisons = compare(run.rounds)
    complete = max((item.against_bare.pairs for item in comparisons), default=0)
    if comparisons:
        console.print(table_of(comparisons, complete))
        console.print(
            "A ratio is the geometric mean over rounds; added TTFT is the median. Spread: bootstrap over rounds."
        )
    for failure in run.rounds.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    settings: dict[str, Any] = {
        key: str(value) for key, value in dataclasses.asdict(options).items() if key != "api_key"
    }
    summary = {
        "command": "overhead",
        "interrupted": interrupted,
        "rounds": complete,
        "options": settings,
        "engine": None if run.engine is None else dataclasses.asdict(run.engine),
        "bare_command": run.bare_command,
        "load_average_1min": run.load_averages,
        "comparisons": [item.as_json() for item in comparisons],
        "trials": {
            f"{streams}:{series}": [dataclasses.asdict(trial) for trial in trials]
            for (streams, series), trials in run.rounds.trials.items()
        },
        "failures": run.rounds.failures,
    }
    write_json(options.out / "overhead.json", summary)
    console.print(f"{options.out / 'overhead.json'} and {options.out / 'requests.jsonl'} hold the figures.")


def register(app: typer.Typer) -> None:
    """Adds `overhead`."""

    @app.command()
    def overhead(
        base_url: Annotated[
            str, typer.Option(help="This application; started when nothing answers.")
        ] = "http://127.0.0.1:8000",
        api_key: ApiKey = None,
        mode: Annotated[str, typer.Option(help="The mode whose engine is compared.")] = "fp16",
        serve_config: Annotated[Path, typer.Option(help="Started with this one mode.")] = Path("serve_config.yaml"),
        bare_url: Annotated[str | None, typer.Option(help="A running vLLM server, instead of starting one.")] = None,
        bare_command: Annotated[str | None, typer.Option(help="Start this instead; gets --host and --port.")] = None,
        bare_env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the bare server.")] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the engine's by default.")] = None,
        streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once; 1 and 8 by default.")] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Best a multiple of 6, the number of orders.")] = 12,
        warmup_rounds: Annotated[int, typer.Option(min=0)] = 1,
        prompt_tokens: Annotated[int, typer.Option(min=40)] = 128,
        output_tokens: Annotated[int, typer.Option(min=4)] = 64,
        settle_s: Annotated[float, typer.Option(callback=finite, min=0.0, help="Rest before each trial.")] = 0.5,
        start_timeout_s: Annotated[float, typer.Option(callback=finite, min=1.0)] = 900.0,
        out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("results/overhead"),
        seed: int = 0,
    ) -> None:
        """Compare with vLLM's own server: same engine settings, interleaved, bare against itself as control."""
        console = results_console()
        options = Options(
            base_url,
            api_key,
            mode,
            serve_config,
            bare_url,
            bare_command,
            bare_env or [],
            tokenizer,
            tuple(streams or (1, 8)),
            rounds,
            warmup_rounds,
            prompt_tokens,
            output_tokens,
            settle_s,
            start_timeout_s,
            out,
            seed,
        )
        if any("=" not in pair for pair in options.bare_env):
            raise typer.BadParameter("wanted KEY=VALUE", param_hint="--bare-env")
        run = Run()
        try:
            interrupted = run_interruptible(_measure(options, run, console))
            _report(options, run, interrupted, console)
        except (ServerFault, EngineUnknown, NothingServed, StartFailed, PromptError, OutputUnwritable) as error:
            console.print(f"overhead: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if not run.rounds.trials:
            raise typer.Exit(1)
