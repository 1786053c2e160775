"""`calibrate`: measures the served modes, writes the profile that routing reads, and says whether routing pays here."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.routing.profile import SCHEMA_VERSION, Profile, ProfileRefused, QualityEvidence, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.answer_fidelity import wanted_answers
from loadgen.calibration_gate import Gate, lossy_engines, reference_of
from loadgen.calibration_plan import (
    FULL_GRIDS,
    QUICK_GRIDS,
    Grid,
    choose_grid,
    expected_s,
    round_order,
    round_s,
)
from loadgen.calibration_trials import Calibrator, TrialFailed
from loadgen.client import OpenAIClient, ServerFault
from loadgen.energy_facts import INCLUDE, EnergySource, offers_energy
from loadgen.fitting import EngineSamples, interference, modes_of_profile
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.profile_answer import answer, table_of, words_of
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.recipe import RecipeRefused, load_recipe
from loadgen.served_modes import Served, read_served
from loadgen.server_facts import NothingServed, first_model, tokenizer_folder
from loadgen.servers import write_json

_QUICK_BUDGET_S, _FULL_BUDGET_S = 540.0, 3300.0
_QUICK_ROUNDS, _FULL_ROUNDS = 5, 10
_QUICK_TEXTS, _FULL_TEXTS = 24, 80
_TEXTS_SHARE, _ANSWERS_SHARE = 0.25, 0.15
"""Of the budget, at most, for the quality gate; few modes need answers."""


class CalibrationFailed(Exception):
    """Nothing usable was measured, or an input file is wrong; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    full: bool
    budget_s: float
    out: Path
    model: str | None
    hardware: str | None
    tokenizer: Path | None
    seed: int
    gate: bool
    judged: frozenset[str]
    """Modes whose quality is known already."""


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    served: Served | None = None
    samples: dict[str, EngineSamples] = dataclasses.field(default_factory=dict)
    grid: Grid | None = None
    rounds: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    gate: Gate = dataclasses.field(default_factory=Gate)
    energy: EnergySource | None = None


async def _measure(options: Options, found: Found, console: Console) -> None:
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(OpenAIClient(options.base_url))
        overview = await asker.get_json("/v1/modes", timeout_s=30.0)
        served = found.served = read_served(overview, options.model, options.hardware)
        name = await first_model(asker)
        found.energy = EnergySource(await offers_energy(asker, f"{name}:{served.modes[0].name}"))
        client = await stack.enter_async_context(
            OpenAIClient(options.base_url, include=INCLUDE if found.energy.offered else None)
        )
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(client)))
        engines = {one.name: one for one in served.engines}
        calibrator = Calibrator(client, name, engines, maker, found.energy, seed=options.seed)
        found.samples = calibrator.samples
        with console.status(f"warm-up of {len(engines)} engines"):
            pace = await calibrator.warm_up()
        if options.gate:
            found.gate = Gate(lossy_engines(served.modes, options.judged), wanted_answers(overview))
            await _judge(options, served, asker, name, found.gate, console)
        left_s = options.budget_s - (time.perf_counter() - began)
        grids = FULL_GRIDS if options.full else QUICK_GRIDS
        grid = found.grid = choose_grid(served.engines, grids, pace, left_s, served.longest_tokens)
        console.print(
            f"{len(engines)} engines for {len(served.modes)} modes; a round takes about "
            f"{round_s(served.engines, grid, pace):.0f} s, the budget is {options.budget_s:.0f} s.",
            markup=False,
        )
        took_s: dict[Any, float] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, refresh_per_second=1) as bar:
            shown = bar.add_task("", total=options.budget_s)
            for number in range(_FULL_ROUNDS if options.full else _QUICK_ROUNDS):
                for task in round_order(served.engines, grid, number, options.seed):
                    now = time.perf_counter()
                    bar.update(shown, completed=now - began, description=f"round {number + 1}: {_words(task)}")
                    if now - began + took_s.get(task, expected_s(task, grid, pace)) > options.budget_s:
                        await calibrator.note_memory()
                        return
                    try:
                        await calibrator.carry_out(task, grid)
                    except TrialFailed as failed:
                        found.failures.append(f"round {number + 1}, {_words(task)}: {failed}")
                    took_s[task] = time.perf_counter() - now
                found.rounds = number + 1
                await calibrator.note_memory()


async def _judge(
    options: Options, served: Served, client: OpenAIClient, name: str, gate: Gate, console: Console
) -> None:
    """Evidence on lossy modes that have none; a server that cannot give it is told and costs nothing else."""
    reference = reference_of(served.modes, RoutingSettings().reference_mode)
    if not gate.engines or reference is None:
        return
    count = _FULL_TEXTS if options.full else _QUICK_TEXTS
    with console.status(f"quality of {', '.join(gate.engines)} against {reference} on {count} texts"):
        whys = [await gate.read(client, name, reference, count, _TEXTS_SHARE * options.budget_s)]
    if gate.to_answer:
        with console.status(f"answers of {', '.join(gate.to_answer)} against {reference}"):
            whys.append(await gate.answer(client, name, reference, _ANSWERS_SHARE * options.budget_s))
    for why in filter(None, whys):
        console.print(why, style="yellow", markup=False)


def _words(task: Any) -> str:
    return " ".join(
        str(value) for value in (type(task).__name__.removesuffix("Task").lower(), *dataclasses.astuple(task))
    )


def read_quality(path: Path) -> list[QualityEvidence]:
    """A file with a list of quality evidence. Raises CalibrationFailed when it is missing or malformed."""
    try:
        return TypeAdapter(list[QualityEvidence]).validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationFailed(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise CalibrationFailed(f"{path} is no list of quality evidence, at {place}: {first['msg']}") from error


def make_profile(
    served: Served, samples: Mapping[str, EngineSamples], quality: Sequence[QualityEvidence], measured_at: str
) -> Profile:
    """The profile, checked as the controller checks it. Raises CalibrationFailed where nothing usable was measured."""
    modes = modes_of_profile(served.engines, served.carried, samples)
    if not modes:
        raise CalibrationFailed("no engine was measured at two prompt lengths and one batch size: raise --budget-s")
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": served.model,
        "hardware": served.hardware,
        "measured_at": measured_at,
        "modes": modes,
        "interference": interference(samples),
        "quality": [one.model_dump(mode="json") for one in quality],
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    content["version"] = f"{measured_at[:10]}-{digest}"
    # Through JSON, as the controller will read it: points are lists there.
    return parse_profile(json.dumps(content), model=served.model, hardware=served.hardware)


def _quality_words(one: QualityEvidence) -> str:
    figures = "" if one.delta is None or one.low is None else f" ({one.metric} {one.delta:.4f}, at least {one.low:.4f})"
    scope = "text without a tag" if one.scope == Tag.NONE else one.scope
    return f"Quality of {one.mode} on {scope}: {one.outcome.value.replace('_', ' ')}{figures}."


def _report(found: Found, profile: Profile, options: Options, recipe_name: str, console: Console) -> None:
    served = found.served
    assert served is not None
    told = answer(profile, served.modes, load_recipe(recipe_name), RoutingSettings())
    console.print(table_of(told))
    for one in profile.quality:
        if one.mode in served.lossy:
            console.print(_quality_words(one), markup=False)
    for sentence in words_of(told):
        console.print(sentence, markup=False)
    missing = [one.name for one in served.engines if not found.samples[one.name].usable]
    if missing:
        console.print(f"Not measured enough, so not in the profile: {', '.join(missing)}", style="yellow", markup=False)
    for failure in found.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    if found.energy is None or found.energy.method is None:
        console.print("The server told no energy, so the profile has none.")
    console.print(f"{options.out} holds profile {profile.version} ({found.rounds} whole rounds).", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `calibrate`."""

    @app.command()
    def calibrate(
        base_url: Annotated[str, typer.Option(help="This application.")] = "http://127.0.0.1:8000",
        full: Annotated[bool, typer.Option("--full/--quick", help="Under an hour, or under ten minutes.")] = False,
        budget_s: Annotated[
            float | None, typer.Option(min=5.0, help="Time to measure in; 540 quick, 3300 full.")
        ] = None,
        out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
        quality: Annotated[Path | None, typer.Option(help="Quality evidence, as `quality` writes it.")] = None,
        recipe: Annotated[str, typer.Option(help="The mix that the answer is for: a name or a file.")] = "cpu",
        model: Annotated[str | None, typer.Option(help="Model name, where the server does not tell it.")] = None,
        hardware: Annotated[str | None, typer.Option(help="Hardware name, where the server does not tell it.")] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        gate: Annotated[bool, typer.Option(help="Judge lossy modes that --quality says nothing of.")] = True,
        seed: int = 0,
    ) -> None:
        """Measure every mode, write the profile that routing reads, and say whether routing is worth it here."""
        console = Console()
        budget = budget_s or (_FULL_BUDGET_S if full else _QUICK_BUDGET_S)
        found = Found()
        try:
            evidence = [] if quality is None else read_quality(quality)
            load_recipe(recipe)
            judged = frozenset(one.mode for one in evidence)
            options = Options(base_url, full, budget, out, model, hardware, tokenizer, seed, gate, judged)
            interrupted = run_interruptible(_measure(options, found, console))
            if found.served is None:
                raise CalibrationFailed("interrupted before anything was measured")
            evidence += found.gate.evidence()
            profile = make_profile(
                found.served, found.samples, evidence, datetime.now(UTC).isoformat(timespec="seconds")
            )
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, profile.model_dump(mode="json", exclude_none=True))
        except (
            CalibrationFailed,
            NothingServed,
            OSError,
            ProfileRefused,
            PromptError,
            RecipeRefused,
            ServerFault,
            TrialFailed,
        ) as error:
            console.print(f"calibrate: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        _report(found, profile, options, recipe, console)
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if found.failures:
            raise typer.Exit(1)
