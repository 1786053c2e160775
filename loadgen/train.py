"""`train`: routers learned from measurements, judged on prompts they have not seen, and exported for `learned`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from app.routing.policies.learned import PredictorRefused
from loadgen.best_mode import Constraint, Constraints
from loadgen.calibration_profile import CalibrationFailed, read_quality
from loadgen.console import results_console
from loadgen.exported_model import Exported, exported_table, write_model
from loadgen.interruption import EXIT_INTERRUPTED, signals_as_interrupts
from loadgen.learners import (
    LEARNERS,
    Held,
    NothingToLearn,
    cross_validate,
    fit,
    static_choices,
)
from loadgen.paper.tables import PAPER_HARDWARE, PAPER_MODEL, TablesDamaged, load_tables
from loadgen.records import OutputUnwritable, require_writable
from loadgen.servers import write_json
from loadgen.training_data import (
    Dataset,
    TrainingDataUnusable,
    paper_dataset,
    read_training,
)


def held_table(heading: str, found: Mapping[str, Held]) -> Table:
    """Policies by name; ratios are means over requests, with 95 % intervals over prompt groups."""
    table = Table(title=heading)
    table.add_column("")
    for name in ("as the oracle", "of its latency", "speed-up", "energy ratio", "unsafe", "twins in training"):
        table.add_column(name, justify="right")
    for name, item in found.items():
        table.add_row(
            name,
            f"{100 * item.match:.0f} %",
            f"{100 * item.latency_capture:.1f} %",
            item.speedup_interval.words(),
            "unknown" if item.energy_ratio is None else item.energy_ratio.words(),
            f"{100 * item.unsafe:.1f} %",
            f"{100 * item.twin_share:.0f} %",
        )
    return table


def confusion_table(name: str, found: Held) -> Table:
    """Requests by the oracle's mode (rows) and the chosen one (columns)."""
    table = Table(title=f"{name}: requests by the oracle's mode and the chosen one, held out")
    table.add_column("oracle")
    chosen = sorted({choice for _, choice in found.confusion})
    for mode in chosen:
        table.add_column(mode, justify="right")
    for best in sorted({best for best, _ in found.confusion}):
        table.add_row(best, *(f"{found.confusion.get((best, choice), 0):.0f}" for choice in chosen))
    return table


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the functions that find them, so that an interruption loses nothing."""

    held: dict[str, Held] = dataclasses.field(default_factory=dict)
    exported: dict[str, Exported] = dataclasses.field(default_factory=dict)


def judge_all(data: Dataset, learners: Sequence[str], found: dict[str, Held], console: Console) -> None:
    """The oracle, every mode used throughout, and each learner held out, without and with live signals."""
    constraints = Constraints()
    found.update(static_choices(data, constraints))
    for learner in learners:
        for live in (False, True):
            name = f"{learner}, {'live signals too' if live else 'features of the paper'}"
            with console.status(name):
                try:
                    found[name] = cross_validate(learner, data, constraints, live=live)
                except NothingToLearn as error:
                    console.print(f"{learner}: {error}", style="yellow", markup=False)
                    return


def _as_json(found: Mapping[str, Held]) -> dict[str, Any]:
    """Confusion as a list, since JSON has no pairs for keys; intervals with their names."""
    return {
        name: dataclasses.asdict(item)
        | {
            "speedup_interval": item.speedup_interval.as_json(),
            "energy_ratio": None if item.energy_ratio is None else item.energy_ratio.as_json(),
            "confusion": [
                {"oracle": best, "chosen": choice, "requests": count}
                for (best, choice), count in sorted(item.confusion.items())
            ],
        }
        for name, item in found.items()
    }


def _describe(name: str, data: Dataset, console: Console) -> None:
    requests = float(data.weights().sum())
    points = len({example.vector for example in data.examples})
    console.print(
        f"{name}: {requests:.0f} requests, {points} different feature vectors, {len(set(data.groups))} groups, "
        f"modes {', '.join(data.modes)}",
        markup=False,
    )


def _missing_words(missing: Mapping[Constraint, float], data: Dataset) -> str:
    """Which limits the labels do not keep to everywhere, and in how many requests."""
    total = float(data.weights().sum())
    parts = (f"{kind} in {count:.0f} of {total:.0f} requests" for kind, count in missing.items())
    hint = " (--quality FILE or --allow MODE keep out what loses quality)" if Constraint.QUALITY in missing else ""
    return f"Limits that the labels do not keep to, for want of measurements: {', '.join(parts)}{hint}."


def register(app: typer.Typer) -> None:
    """Adds `train`."""

    @app.command("train")
    def train(
        data: Annotated[Path | None, typer.Argument(help="training.jsonl; the paper's table without it.")] = None,
        model: Annotated[str | None, typer.Option(help="Model that was measured, as the profile names it.")] = None,
        hardware: Annotated[str | None, typer.Option(help="Hardware that was measured on.")] = None,
        reference: Annotated[str, typer.Option(help="Mode that energy is constrained by.")] = "fp16",
        quality: Annotated[
            Path | None, typer.Option(help="Quality evidence, as `quality` writes it: what it keeps out is no label.")
        ] = None,
        allow: Annotated[list[str] | None, typer.Option(help="Only these modes and the reference.")] = None,
        learner: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(LEARNERS)}; all by default.")] = None,
        confusion: Annotated[bool, typer.Option(help="Show the confusion matrices.")] = True,
        out: Annotated[Path, typer.Option(help="Folder for the models and train.json.")] = Path("results/train"),
    ) -> None:
        """Train routers on measured modes, judge them on unseen prompts, export them for the policy `learned`."""
        console = results_console()
        learners = learner or list(LEARNERS)
        if unknown := set(learners) - set(LEARNERS):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(LEARNERS)}")
        if data is not None and (model is None or hardware is None):
            raise typer.BadParameter("a model is trained for one --model on one --hardware: name both")
        if data is None and quality is not None:
            raise typer.BadParameter("the paper's table has a quality of its own: --quality is for your data")
        found, interrupted = Found(), False
        try:
            used = paper_dataset(load_tables()) if data is None else read_training(data, reference)
            if allow:
                used = used.allowing(allow)
            if quality is not None:
                used = used.passing(read_quality(quality))
            missing = used.not_judged(Constraints())
            if allow or quality is not None:
                missing.pop(Constraint.QUALITY, None)
            require_writable(out / "train.json")
            try:
                with signals_as_interrupts():
                    _describe("the paper's table" if data is None else str(data), used, console)
                    if missing:
                        console.print(_missing_words(missing, used), style="yellow", markup=False)
                    judge_all(used, learners, found.held, console)
                    _show_held(found.held, confusion, console)
                    names = (model or PAPER_MODEL, hardware or PAPER_HARDWARE)
                    _export_all(used, learners, out, *names, found.exported, console)
            except KeyboardInterrupt:
                interrupted = True
            if found.exported:
                console.print(exported_table(found.exported))
            about = {
                "data": str(data or "paper"),
                "allow": allow,
                "quality": None if quality is None else str(quality),
                "not_judged": missing,
            }
            _write(out / "train.json", about, used, found, interrupted)
        except (
            CalibrationFailed,
            TrainingDataUnusable,
            TablesDamaged,
            PredictorRefused,
            OutputUnwritable,
            ImportError,
        ) as error:
            console.print(f"train: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        except OSError as error:
            console.print(f"train: cannot write {out}: {error.strerror or error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            console.print(f"train: interrupted; {out}/train.json holds what was found until then.", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED)
        console.print(f"{out} holds the models and train.json; set knowledge.trained_model to one.", markup=False)


def _show_held(held: Mapping[str, Held], confusion: bool, console: Console) -> None:
    console.print(held_table("Held out by prompt group; the oracle and fixed modes see everything", held))
    for name in held if confusion else ():
        if name.partition(",")[0] in LEARNERS:
            console.print(confusion_table(name, held[name]))


def _write(path: Path, about: Mapping[str, Any], data: Dataset, found: Found, interrupted: bool) -> None:
    write_json(
        path,
        {
            "command": "train",
            "interrupted": interrupted,
            **about,
            "reference": data.reference,
            "held": _as_json(found.held),
            "exported": {name: item.as_json() for name, item in found.exported.items()},
        },
    )


def _export_all(
    data: Dataset,
    learners: Sequence[str],
    out: Path,
    model: str,
    hardware: str,
    found: dict[str, Exported],
    console: Console,
) -> None:
    """Fits on all examples: the held-out figures say how such a router fares, the exported one has seen everything."""
    for name in learners:
        with console.status(f"exporting {name}"):
            try:
                fitted = fit(name, data, data.features(), Constraints())
            except NothingToLearn as error:
                console.print(f"{name}: {error}", style="yellow", markup=False)
                continue
            found[name] = write_model(out / f"{name}.onnx", fitted, data, model=model, hardware=hardware)
