"""`quality`: whether a mode answers as well as the reference, paired question by question, with an interval."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from app.routing.tags import Tag
from loadgen.answer_fidelity import measure_answers, wanted_answers
from loadgen.benchmarks import BenchmarkUnreadable, Question, read_questions
from loadgen.client import OpenAIClient, ServerFault
from loadgen.console import results_console
from loadgen.fidelity import (
    FidelityUnavailable,
    TextFidelity,
    allowed_top_tokens,
    fewer_words,
    measure_fidelity,
    stdlib_texts,
)
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.lm_eval_samples import SamplesUnreadable, Source, pair_samples
from loadgen.options import ApiKey, finite
from loadgen.quality_gate import Limits, kl_meaning
from loadgen.quality_report import (
    Measured,
    accuracies,
    accuracy_table,
    all_evidence,
    evidence_table,
    likeness,
    likeness_table,
    settled,
    summary,
)
from loadgen.questioning import Answered, ask_all, scopes_of
from loadgen.records import LineWriter, OutputUnwritable
from loadgen.server_facts import NothingServed, model_name, overview_of, served_name
from loadgen.servers import write_json


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What the command was asked for, checked."""

    base_url: str
    api_key: str | None
    served: str | None
    reference: str
    modes: Sequence[str]
    questions: Sequence[Question]
    texts: int
    output_tokens: int
    concurrency: int
    stall_s: float
    limits: Limits
    out: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A text to read, with the scopes it speaks for once its length in tokens is known."""

    text: str
    question: Question | None = None

    def scopes(self, tokens: int, output_tokens: int) -> tuple[str, ...]:
        if self.question is None:
            return (Tag.NONE.value,)
        return scopes_of(self.question, tokens + 1, output_tokens)


def passages(questions: Sequence[Question], count: int) -> list[Passage]:
    """`count` texts without a tag, and as many of each suite: a question with its right answer."""
    found = [Passage(text) for text in stdlib_texts(count)]
    for suite in dict.fromkeys(question.suite for question in questions):
        of_suite = [question for question in questions if question.suite == suite][:count]
        found += [Passage(f"{question.prompt}\nAnswer: {question.reference or ''}", question) for question in of_suite]
    return found


async def lossy_modes(client: OpenAIClient, reference: str) -> list[str]:
    """Modes that are ready and whose quality is a question. Raises ServerFault, and NothingServed for none."""
    answer = await overview_of(client)
    rows = [row for row in answer.get("data") or () if isinstance(row, dict)]
    found = [str(row.get("id")) for row in rows if row.get("state") == "ready" and row.get("lossless") is False]
    if not (found := [mode for mode in found if mode != reference]):
        raise NothingServed(f"{client.base_url} has no lossy mode that is ready: name modes with --mode")
    return found


async def _measure(plan: Plan, measured: Measured, console: Console) -> None:
    async with OpenAIClient(plan.base_url, api_key=plan.api_key, stall_s=plan.stall_s) as client:
        served = plan.served or await served_name(client)
        modes = list(plan.modes) or await lossy_modes(client, plan.reference)
        console.print(f"{served or plan.base_url}: {', '.join(modes)} against {plan.reference}", markup=False)
        texts = passages(plan.questions, plan.texts)
        with (
            LineWriter(plan.out / "answers.jsonl") as answer_lines,
            LineWriter(plan.out / "texts.jsonl") as text_lines,
            Bar(console=console, transient=True) as bar,
        ):
            task = bar.add_task("texts", total=len(texts) * len(modes))

            def keep_text(found: TextFidelity) -> None:
                measured.texts.append((texts[found.text].scopes(found.tokens, plan.output_tokens), found))
                text_lines.write(found.to_json())
                bar.advance(task)

            def keep_answers(found: list[Answered]) -> None:
                measured.answers.append(found)
                for answer in found:
                    answer_lines.write(answer.to_json())
                bar.advance(task)

            if texts:
                models = [model_name(served, mode) for mode in (plan.reference, *modes)]
                measured.top_tokens = await allowed_top_tokens(client, models)
                if words := fewer_words(client.base_url, measured.top_tokens):
                    console.print(words, style="yellow", markup=False)
            await _answers(client, plan, served, modes, measured, console)
            if texts:
                await measure_fidelity(
                    client,
                    served,
                    plan.reference,
                    modes,
                    [passage.text for passage in texts],
                    top_tokens=measured.top_tokens,
                    concurrency=plan.concurrency,
                    on_text=keep_text,
                )
            task = bar.add_task("questions", total=len(plan.questions))
            await ask_all(
                client,
                served,
                plan.reference,
                modes,
                plan.questions,
                output_tokens=plan.output_tokens,
                concurrency=plan.concurrency,
                on_answers=keep_answers,
            )


async def _answers(
    client: OpenAIClient, plan: Plan, served: str, modes: Sequence[str], measured: Measured, console: Console
) -> None:
    """Of the modes that texts and single questions show too little of; a server that cannot give them is told.

    Raises ServerFault, also where the server does not say which modes those are: they would pass by texts alone.
    """
    try:
        wanted = wanted_answers(await overview_of(client))
    except NothingServed:  # a server without modes: nothing is known of them
        return
    measured.wanted = {mode: why for mode, why in wanted.items() if mode in modes}
    if measured.wanted:
        texts = stdlib_texts(plan.limits.bootstrap_samples_min)
        try:
            with console.status(f"answers of {', '.join(measured.wanted)}"):
                await measure_answers(
                    client,
                    served,
                    plan.reference,
                    measured.wanted,
                    texts,
                    measured.generated,
                    top_tokens=measured.top_tokens,
                )
        except FidelityUnavailable as why:
            console.print(f"no answers to judge {', '.join(measured.wanted)} by: {why}", style="yellow", markup=False)


def report(measured: Measured, limits: Limits, out: Path, console: Console, *, complete: bool) -> None:
    """Shows and writes all that was measured. Raises OutputUnwritable."""
    found = all_evidence(measured, limits)
    if accuracy := accuracies(measured):
        console.print(accuracy_table(accuracy))
    if alike := {mode: rows for mode, rows in likeness(measured).items() if rows}:
        console.print(likeness_table(alike))
    console.print(evidence_table(found, limits))
    if measured.texts or measured.generated:
        console.print(kl_meaning(limits), markup=False)
    if failed := measured.failed:
        console.print(
            f"{len(failed)} answers failed and make no pair, such as: {failed[0].error}", style="yellow", markup=False
        )
    write_json(out / "quality.json", [item.model_dump(mode="json") for item in settled(found)])
    write_json(out / "summary.json", {"command": "quality", "complete": complete} | summary(measured, limits, found))
    console.print(f"{out / 'quality.json'} is for `calibrate --quality`; summary.json has everything.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `quality`."""

    @app.command("quality")
    def quality(
        files: Annotated[list[Path] | None, typer.Argument(help="JSON lines of questions; none: texts only.")] = None,
        base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
        mode: Annotated[
            list[str] | None,
            typer.Option(help="Modes to judge; the ready lossy ones by default. At a server without modes, models."),
        ] = None,
        reference: Annotated[str, typer.Option(help="Mode to compare with.")] = "fp16",
        model: Annotated[str | None, typer.Option(help="Served model; the first listed by default.")] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="Questions of each file, drawn by --seed.")] = None,
        seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
        texts: Annotated[int, typer.Option(min=0, help="Texts to read of each suite, and without one.")] = 32,
        output_tokens: Annotated[int, typer.Option(min=1, help="Longest generated answer.")] = 256,
        concurrency: Annotated[int, typer.Option(min=1, help="Questions under way at once.")] = 2,
        accuracy_drop: Annotated[
            float, typer.Option(callback=finite, min=0, help="Points of accuracy a mode may lose.")
        ] = 1.5,
        kl_max: Annotated[float, typer.Option(callback=finite, min=0, help="Nats a token a mode may stray.")] = 0.05,
        samples: Annotated[list[str] | None, typer.Option(help="lm-eval's samples: MODE:SCOPE=FILE.")] = None,
        api_key: ApiKey = None,
        stall_s: Annotated[
            float, typer.Option(callback=finite, min=0.1, help="Longest silence of the server.")
        ] = 300.0,
        out: Annotated[Path, typer.Option(help="Folder for quality.json and the answers.")] = Path("results/quality"),
    ) -> None:
        """Judge lossy modes against the reference: accuracy, KL, likeness of text. Only `pass` makes one eligible."""
        console = results_console()
        limits = Limits(accuracy_drop_max_points=accuracy_drop, kl_max_nats=kl_max)
        measured = Measured()
        interrupted, failed = False, False
        try:
            sources = [Source.parse(text) for text in samples or ()]
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--samples") from error
        try:
            measured.pairs = pair_samples(sources, reference)
            questions = read_questions(files or (), limit=limit, seed=seed)
            plan = Plan(
                base_url,
                api_key,
                model,
                reference,
                [name for name in mode or () if name != reference],
                questions,
                texts,
                output_tokens,
                concurrency,
                stall_s,
                limits,
                out,
            )
            # Samples alone are judged without a server.
            if questions or texts:
                interrupted = run_interruptible(_measure(plan, measured, console))
        except (BenchmarkUnreadable, SamplesUnreadable, OutputUnwritable, NothingServed) as error:
            console.print(f"quality: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        except (ServerFault, FidelityUnavailable, ImportError) as error:
            console.print(f"quality: {error}", style="red", markup=False)
            failed = True
        if not (measured.answers or measured.texts or measured.pairs):
            if interrupted:
                console.print("quality: interrupted before anything was answered", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED if interrupted else 2)
        try:
            report(measured, limits, out, console, complete=not (interrupted or failed))
        except OutputUnwritable as error:
            console.print(f"quality: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted or failed:
            raise typer.Exit(EXIT_INTERRUPTED if interrupted else 2)
