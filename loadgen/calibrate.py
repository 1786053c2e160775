"""`calibrate`: measures the served modes, writes the profile that routing reads, and says whether routing pays here."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.routing.profile import Profile, ProfileRefused, QualityEvidence
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.answer_fidelity import wanted_answers
from loadgen.calibration_gate import Gate, lossy_engines, reference_of, texts_to_read
from loadgen.calibration_plan import (
    FULL_GRIDS,
    QUICK_GRIDS,
    Grid,
    Pace,
    Task,
    choose_grid,
    expected_s,
    round_order,
    round_s,
)
from loadgen.calibration_profile import CalibrationFailed, make_profile, read_quality
from loadgen.calibration_trials import Calibrator, TrialFailed
from loadgen.client import Call, OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.energy_facts import INCLUDE, EnergySource, offers_energy
from loadgen.fitting import EngineSamples
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.options import ApiKey, finite
from loadgen.profile_answer import answer, table_of, words_of
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.quality_gate import Limits, kl_meaning
from loadgen.recipe import RecipeRefused, load_recipe
from loadgen.records import LineWriter, OutputUnwritable, RecordWriter, RequestRecord, require_writable
from loadgen.served_modes import Served, read_served, read_settings
from loadgen.server_facts import NothingServed, first_model, overview_of, tokenizer_folder
from loadgen.servers import write_json

_QUICK_BUDGET_S, _FULL_BUDGET_S = 540.0, 3300.0
_QUICK_ROUNDS, _FULL_ROUNDS = 5, 10
_QUICK_TEXTS, _FULL_TEXTS = (24, 0), (80, 24)
"""Read by every lossy engine and the reference: without a tag, and of each tag that reading is evidence for."""
_TEXTS_SHARE, _ANSWERS_SHARE = 0.25, 0.15
"""Of the budget, at most, for the quality gate; few modes need answers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    api_key: str | None
    full: bool
    budget_s: float
    out: Path
    results: Path
    model: str | None
    hardware: str | None
    tokenizer: Path | None
    seed: int
    gate: bool
    evidence: Sequence[QualityEvidence]
    """Of modes whose quality is known already."""

    @property
    def judged(self) -> frozenset[str]:
        return frozenset(one.mode for one in self.evidence)


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    served: Served | None = None
    settings: RoutingSettings = dataclasses.field(default_factory=RoutingSettings)
    settings_unknown: str | None = None
    samples: dict[str, EngineSamples] = dataclasses.field(default_factory=dict)
    rounds: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    gate: Gate = dataclasses.field(default_factory=Gate)
    energy: EnergySource | None = None

    def write_profile(self, options: Options) -> Profile:
        """Raises CalibrationFailed while too little was measured, and OutputUnwritable."""
        if self.served is None:
            raise CalibrationFailed("interrupted before anything was measured")
        measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        profile = make_profile(self.served, self.samples, [*options.evidence, *self.gate.evidence()], measured_at)
        write_json(options.out, profile.model_dump(mode="json", exclude_none=True))
        return profile


class _RecordedClient(OpenAIClient):
    """Every request becomes a line, under the name of the task it was sent for."""

    def __init__(self, base_url: str, writer: RecordWriter, **options: Any) -> None:
        super().__init__(base_url, **options)
        self.task = "warm-up"
        self._writer = writer
        self._sent = 0

    async def send(
        self, call: Call, record: RequestRecord | None = None, *, due: float | None = None, origin: float = 0.0
    ) -> RequestRecord:
        record = record or RequestRecord(index=self._sent, workload=self.task, warmup=self.task == "warm-up")
        self._sent += 1
        try:
            return await super().send(call, record, due=due, origin=origin)
        finally:
            self._writer.write(record)


async def _measure(options: Options, found: Found, console: Console) -> None:
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.results))
        texts = stack.enter_context(LineWriter(options.results / "texts.jsonl"))
        asker = await stack.enter_async_context(OpenAIClient(options.base_url, api_key=options.api_key))
        overview = await overview_of(asker)
        served = found.served = read_served(overview, options.model, options.hardware)
        found.settings, found.settings_unknown = read_settings(overview)
        name = await first_model(asker)
        found.energy = EnergySource(await offers_energy(asker, f"{name}:{served.modes[0].name}"))
        include = INCLUDE if found.energy.offered else None
        client = await stack.enter_async_context(
            _RecordedClient(options.base_url, writer, api_key=options.api_key, include=include)
        )
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(client)))
        engines = {one.name: one for one in served.engines}
        calibrator = Calibrator(client, name, engines, maker, found.energy, seed=options.seed)
        found.samples = calibrator.samples
        with console.status(f"warm-up of {len(engines)} engines"):
            pace = await calibrator.warm_up()
        if options.gate:
            found.gate = Gate(lossy_engines(served.modes, options.judged), wanted_answers(overview))
            found.gate.on_text = lambda text: texts.write(text.to_json())
            await _judge(options, found, asker, name, console)
        left_s = options.budget_s - (time.perf_counter() - began)
        grids = FULL_GRIDS if options.full else QUICK_GRIDS
        grid = choose_grid(served.engines, grids, pace, left_s, served.longest_tokens)
        console.print(
            f"{len(engines)} engines for {len(served.modes)} modes; a round takes about "
            f"{round_s(served.engines, grid, pace):.0f} s, the budget is {options.budget_s:.0f} s.",
            markup=False,
        )
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, refresh_per_second=1) as bar:
            shown = bar.add_task("", total=options.budget_s)

            def show(words: str) -> None:
                client.task = words
                bar.update(shown, completed=time.perf_counter() - began, description=words)

            await _rounds(options, found, calibrator, grid, pace, began + options.budget_s, show)
        await calibrator.note_memory()


async def _rounds(
    options: Options,
    found: Found,
    calibrator: Calibrator,
    grid: Grid,
    pace: Pace,
    deadline: float,
    show: Callable[[str], None],
) -> None:
    """Measures until the rounds or the time are over, and writes the profile after each whole round."""
    assert found.served is not None
    took_s: dict[Task, float] = {}
    for number in range(_FULL_ROUNDS if options.full else _QUICK_ROUNDS):
        for task in round_order(found.served.engines, grid, number, options.seed):
            now = time.perf_counter()
            words = f"round {number + 1}: {_words(task)}"
            show(words)
            if now + took_s.get(task, expected_s(task, grid, pace)) > deadline:
                return
            try:
                await calibrator.carry_out(task, grid)
            except TrialFailed as failed:
                found.failures.append(f"{words}: {failed}")
            took_s[task] = time.perf_counter() - now
        found.rounds = number + 1
        await calibrator.note_memory()
        # A kill from here on loses one round at most.
        with suppress(CalibrationFailed):
            found.write_profile(options)


async def _judge(options: Options, found: Found, client: OpenAIClient, name: str, console: Console) -> None:
    """Evidence on lossy modes that have none; a server that cannot give it is told and costs nothing else."""
    assert found.served is not None
    gate = found.gate
    reference = reference_of(found.served.modes, found.settings.reference_mode)
    if not gate.engines or reference is None:
        return
    texts = texts_to_read(*(_FULL_TEXTS if options.full else _QUICK_TEXTS))
    with console.status(f"quality of {', '.join(gate.engines)} against {reference} on {len(texts)} texts"):
        whys = [await gate.prepare(client, name, reference)]
        whys.append(await gate.read(client, name, reference, texts, _TEXTS_SHARE * options.budget_s))
    if gate.to_answer:
        with console.status(f"answers of {', '.join(gate.to_answer)} against {reference}"):
            whys.append(await gate.answer(client, name, reference, _ANSWERS_SHARE * options.budget_s))
    for why in filter(None, whys):
        console.print(why, style="yellow", markup=False)


def _words(task: Task) -> str:
    return " ".join(
        str(value) for value in (type(task).__name__.removesuffix("Task").lower(), *dataclasses.astuple(task))
    )


def _quality_words(one: QualityEvidence) -> str:
    covered = "" if one.covered is None else f", {100 * one.covered:.0f} % of the probability compared"
    known = one.delta is not None and one.low is not None
    figures = f" ({one.metric} {one.delta:.4f}, at least {one.low:.4f}{covered})" if known else ""
    scope = "text without a tag" if one.scope == Tag.NONE else one.scope
    return f"Quality of {one.mode} on {scope}: {one.outcome.value.replace('_', ' ')}{figures}."


def _report(
    found: Found, profile: Profile, options: Options, recipe_name: str, interrupted: bool, console: Console
) -> None:
    served = found.served
    assert served is not None
    told = answer(profile, served.modes, load_recipe(recipe_name), found.settings)
    console.print(table_of(told))
    names = {mode.name for mode in served.modes}
    quality = [_quality_words(one) for one in profile.quality if one.mode in names]
    sentences = words_of(told) + ([found.settings_unknown] if found.settings_unknown else [])
    for sentence in quality + sentences:
        console.print(sentence, markup=False)
    if quality:
        console.print(kl_meaning(Limits()), markup=False)
    missing = [one.name for one in served.engines if not found.samples[one.name].usable]
    if missing:
        console.print(f"Not measured enough, so not in the profile: {', '.join(missing)}", style="yellow", markup=False)
    for failure in found.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    if found.energy is None or found.energy.method is None:
        console.print("The server told no energy, so the profile has none.")
    summary = {
        "command": "calibrate",
        "interrupted": interrupted,
        "profile": str(options.out),
        "version": profile.version,
        "rounds": found.rounds,
        "recipe": recipe_name,
        "routing_settings": found.settings.model_dump(mode="json"),
        "answer": sentences,
        "quality": quality,
        "quality_bound": kl_meaning(Limits()),
        "top_tokens": found.gate.top_tokens,
        "not_measured": missing,
        "failures": found.failures,
    }
    write_json(options.results / "summary.json", summary)
    console.print(f"{options.out} holds profile {profile.version} ({found.rounds} whole rounds).", markup=False)
    console.print(f"{options.results} holds every request and text as JSON lines.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `calibrate`."""

    @app.command()
    def calibrate(
        base_url: Annotated[str, typer.Option(help="This application.")] = "http://127.0.0.1:8000",
        full: Annotated[bool, typer.Option("--full/--quick", help="Under an hour, or under ten minutes.")] = False,
        budget_s: Annotated[
            float | None, typer.Option(callback=finite, min=5.0, help="Time to measure in; 540 quick, 3300 full.")
        ] = None,
        out: Annotated[Path, typer.Option(help="The profile, written anew after each round.")] = Path("profile.json"),
        results: Annotated[Path, typer.Option(help="Folder for what was sent.")] = Path("results/calibrate"),
        quality: Annotated[Path | None, typer.Option(help="Quality evidence, as `quality` writes it.")] = None,
        recipe: Annotated[str, typer.Option(help="The mix that the answer is for: a name or a file.")] = "cpu",
        model: Annotated[str | None, typer.Option(help="Model name, where the server does not tell it.")] = None,
        hardware: Annotated[str | None, typer.Option(help="Hardware name, where the server does not tell it.")] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        api_key: ApiKey = None,
        gate: Annotated[bool, typer.Option(help="Judge lossy modes that --quality says nothing of.")] = True,
        seed: int = 0,
    ) -> None:
        """Measure every mode, write the profile that routing reads, and say whether routing is worth it here."""
        console = results_console()
        budget = budget_s or (_FULL_BUDGET_S if full else _QUICK_BUDGET_S)
        found = Found()
        try:
            evidence = [] if quality is None else read_quality(quality)
            load_recipe(recipe)
            require_writable(out)
            options = Options(
                base_url, api_key, full, budget, out, results, model, hardware, tokenizer, seed, gate, evidence
            )
            interrupted = run_interruptible(_measure(options, found, console))
            _report(found, found.write_profile(options), options, recipe, interrupted, console)
        except (
            CalibrationFailed,
            NothingServed,
            OutputUnwritable,
            ProfileRefused,
            PromptError,
            RecipeRefused,
            ServerFault,
            TrialFailed,
        ) as error:
            console.print(f"calibrate: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if found.failures:
            raise typer.Exit(1)
