"""`compare`: policies side by side on one trace recipe, interleaved, against the best single mode and an oracle."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.client import Call, OpenAIClient, ServerFault
from loadgen.comparison import LIGHT, RULES, SATURATING, STATIC, rate_summary, sentences, training_rows
from loadgen.comparison_run import BARE, DECISION, CompareRefused, ComparisonRuns, Found, Options, runs_of
from loadgen.console import results_console
from loadgen.energy_facts import accepts_include, energy_of, request_record
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.options import ApiKey, finite
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.recipe import RecipeRefused, load_recipe
from loadgen.records import Outcome, OutputUnwritable, RecordWriter
from loadgen.server_facts import NothingServed, engines, first_model, overview_of, tokenizer_folder
from loadgen.servers import write_json

EVERY_MODE = "static:all"
_LOOKS, _PAUSE_S = 8, 0.25
"""How often a record is looked for, and how long between."""


async def _policies(options: Options, client: OpenAIClient) -> tuple[str, ...]:
    """The policies that were asked for, every mode's written out. An alias serves as its mode does: left out."""
    names: list[str] = []
    for policy in options.policies:
        if policy == EVERY_MODE:
            data = (await overview_of(client)).get("data") or ()
            names += [
                f"{STATIC}{mode['id']}" for mode in data if mode.get("state") == "ready" and not mode.get("alias_of")
            ]
        else:
            names.append(policy)
    if options.bare_url is not None:
        names.append(BARE)
    return tuple(dict.fromkeys(names))


async def _measure(options: Options, found: Found, console: Console) -> None:
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RecordWriter(options.out))
        client = await stack.enter_async_context(OpenAIClient(options.base_url, api_key=options.api_key))
        bare = bare_model = None
        if options.bare_url is not None:
            bare = await stack.enter_async_context(OpenAIClient(options.bare_url))
            bare_model = await first_model(bare)
        served = await first_model(client)
        found.policies = await _policies(options, client)
        maker = PromptMaker(ChatTokenizer.load(options.tokenizer or await tokenizer_folder(client)))
        comparison = ComparisonRuns(
            options,
            client,
            bare,
            served,
            bare_model or "",
            maker,
            writer,
            found,
            decisions=await accepts_include(client, served, DECISION),
            records_kept=False,
            salt=f"{random.SystemRandom().getrandbits(32):08x}",
        )
        with console.status("warm-up, and a look at what the server accepts"):
            comparison.records_kept = await keeps_energy(client, served)
            refused = [reason for policy in found.policies for reason in await comparison.check(policy)]
        if refused:
            raise CompareRefused("the server does not serve these policies:\n  " + "\n  ".join(refused))
        await _all_runs(comparison, began, console)
        found.engines = await engines(client)


async def keeps_energy(client: OpenAIClient, served: str) -> bool:
    """True when a finished request's record tells its energy, which it does some tenths of a second after its end."""
    body = {"model": served, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    record = await client.send(Call.of(body))
    if record.outcome is not Outcome.OK:
        return False
    for _ in range(_LOOKS):
        if energy_of(await request_record(client, record)) is not None:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False


async def _all_runs(comparison: ComparisonRuns, began: float, console: Console) -> None:
    options, found = comparison.options, comparison.found
    blocks = runs_of(found.policies, options.rounds, options.seed)
    took_s: dict[str, float] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        total = sum(options.requests[run.rate] for block in blocks for run in block)
        task = bar.add_task("", total=total)
        for block in blocks:
            rate = block[0].rate
            # Half a block compares nothing, so none begins that is not expected to end in time.
            expected_s = took_s.get(rate, options.requests[rate] / options.rates_per_s[rate]) * len(block)
            if time.perf_counter() - began + expected_s > options.budget_s and found.rows:
                found.ended = "the budget of time ended"
                return
            for run in block:
                bar.update(task, description=f"round {run.round + 1}, {rate}: {run.policy}", refresh=True)
                started = time.perf_counter()
                # Drawing between requests only: it holds the interpreter while others are due.
                await comparison.run(run, lambda: bar.advance(task))
                took_s[rate] = max(took_s.get(rate, 0.0), time.perf_counter() - started)
                _write(options, found)
    found.ended = "all rounds were run"


def summary_of(options: Options, found: Found) -> dict[str, Any]:
    """The figures of both rates, and what they say."""
    allowed = tuple(
        policy
        for policy in found.policies
        if policy.startswith(STATIC) and (not options.allow or policy.removeprefix(STATIC) in options.allow)
    )
    summary: dict[str, Any] = {rate: rate_summary(found.rows, rate, allowed) for rate in (LIGHT, SATURATING)}
    return summary | {"words": sentences(summary)}


def _write(options: Options, found: Found, summary: Mapping[str, Any] | None = None) -> None:
    """Both files, whole, after each run: an interruption of any kind loses no run that has ended.

    The summary comes last: its intervals take seconds, which a run's time is better spent on.
    """
    content = {
        "command": "compare",
        "recipe": options.recipe.model_dump(mode="json"),
        "rates_per_s": dict(options.rates_per_s),
        "rounds": options.rounds,
        "seed": options.seed,
        "ended": found.ended,
        "policies": list(found.policies),
        "requests": [row.as_json() for row in found.rows],
        "summary": summary,
        "failures": found.failures,
        "engines": found.engines,
    }
    write_json(options.out / "compare.json", content)
    lines = [json.dumps(row) for row in training_rows(found.rows, found.features, options.seed)]
    part = options.out / "training.part"
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(options.out / "training.jsonl")


def _table(rate: str, rate_per_s: float, found: Mapping[str, Any]) -> Table:
    table = Table(title=f"{rate.capitalize()}: {rate_per_s:g} requests/s, {found['compared_requests']} compared")
    table.add_column("policy", no_wrap=True)
    for name in ("mean ms", "P95 ms", "tokens/s", "J", "errors"):
        table.add_column(name, justify="right")
    for policy, one in sorted(found["policies"].items(), key=lambda item: item[1]["mean_ms"]):
        table.add_row(
            policy,
            *(_figure(one[key], digits) for key, digits in (("mean_ms", 0), ("p95_ms", 0), ("tokens_per_s", 1))),
            _joules(one),
            str(one["errors"]),
        )
    if "oracle_ms" in found:
        table.add_row("hindsight oracle", f"{found['oracle_ms']:.0f}")
        table.add_row("best mode by class", f"{found['class_oracle_ms']:.0f}")
    return table


def _joules(one: Mapping[str, Any]) -> str:
    """With the number of requests that it is the mean of, where the others' joules are unknown."""
    answered = one["requests"] - one["errors"]
    some = f" ({one['energy_requests']} of {answered})" if 0 < one["energy_requests"] < answered else ""
    return _figure(one["energy_j"], 2) + some


def _ratio_table(rate: str, other: str, against: Mapping[str, Any], policies: Sequence[str]) -> Table:
    """Every policy against one of them. Latencies below 1 and throughput above 1 are better than that one's."""
    shares = any("headroom_share" in item for item in against.values())
    table = Table(title=f"{rate.capitalize()}: ratios to {other} [95 % interval]")
    table.add_column("policy", no_wrap=True)
    for name in ("mean latency", "P95 latency", "throughput", *(("of the oracle's gain",) if shares else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in policies:
        if (item := against.get(policy)) is not None:
            ratios = (_interval(item[key], 1, 2) for key in ("mean_ratio", "p95_ratio", "throughput_ratio"))
            share = (_interval(item["headroom_share"], 100, 0, " %"),) if shares else ()
            table.add_row(policy, *ratios, *share)
    return table


def _class_table(rate: str, best: str, against: Mapping[str, Any]) -> Table:
    """Classes downwards, policies that choose across."""
    choosing = [policy for policy in against if not policy.startswith(STATIC)]
    table = Table(title=f"{rate.capitalize()}: mean latency by class as a ratio to {best} [95 % interval]")
    table.add_column("class", no_wrap=True)
    for policy in choosing:
        table.add_column(policy, justify="right")
    names = dict.fromkeys(name for policy in choosing for name in against[policy]["mean_ratio_by_class"])
    for name in names:
        table.add_row(name, *(_interval(against[policy]["mean_ratio_by_class"].get(name), 1, 2) for policy in choosing))
    return table


def _interval(found: Mapping[str, Any] | None, times: float, digits: int, unit: str = "") -> str:
    """Short enough for a table: one pair has no interval."""
    if found is None:
        return ""
    estimate, low, high = (
        None if found[key] is None else f"{times * found[key]:.{digits}f}" for key in ("estimate", "low", "high")
    )
    return f"{estimate}{unit}" if low is None or high is None else f"{estimate}{unit} [{low}, {high}]"


def tables_of(rate: str, rate_per_s: float, found: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of one rate's summary, at most 120 columns wide while few policies choose."""
    yield _table(rate, rate_per_s, found)
    by_mean = sorted(found["policies"], key=lambda policy: found["policies"][policy]["mean_ms"])
    if "best_static" in found:
        best, against = found["best_static"], found["against_best_static"]
        yield _ratio_table(rate, f"{best}, the best single mode", against, by_mean)
        if any(not policy.startswith(STATIC) for policy in against):
            yield _class_table(rate, best, against)
    if "against_rules" in found:
        yield _ratio_table(rate, RULES, found["against_rules"], by_mean)


def _figure(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _report(options: Options, found: Found, console: Console) -> None:
    summary = summary_of(options, found)
    _write(options, found, summary)
    for rate in (LIGHT, SATURATING):
        if summary[rate] is not None:
            for table in tables_of(rate, options.rates_per_s[rate], summary[rate]):
                console.print(table)
    for sentence in summary["words"]:
        console.print(sentence, markup=False)
    for failure in found.failures:
        console.print(f"left out: {failure}", style="yellow", markup=False)
    console.print(f"ended: {found.ended}; {options.out}/compare.json and training.jsonl hold it all.", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `compare`."""

    @app.command()
    def compare(
        policies: Annotated[
            str, typer.Option(help="Comma-separated: cost, rules, learned, static:<mode>; static:all is every mode.")
        ] = f"cost,rules,{EVERY_MODE}",
        base_url: Annotated[str, typer.Option(help="This application.")] = "http://127.0.0.1:8000",
        bare_url: Annotated[str | None, typer.Option(help="vLLM's own server, to compare with.")] = None,
        recipe: Annotated[str, typer.Option(help="A packaged recipe's name, or a file.")] = "cpu",
        rate_light: Annotated[
            float | None, typer.Option(callback=finite, min=1e-6, help="Requests/s; the recipe's by default.")
        ] = None,
        rate_saturating: Annotated[
            float | None, typer.Option(callback=finite, min=1e-6, help="Requests/s, as above.")
        ] = None,
        requests_light: Annotated[int | None, typer.Option(min=1, help="In each run; the recipe's by default.")] = None,
        requests_saturating: Annotated[int | None, typer.Option(min=1, help="In each run, as above.")] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Each has both rates, with prompts of its own.")] = 2,
        budget_s: Annotated[
            float, typer.Option(callback=finite, min=1.0, help="No block begins that would end after it.")
        ] = 1500.0,
        allow: Annotated[
            list[str] | None,
            typer.Option(help="Modes that may be the best static mode and the oracle's; all by default."),
        ] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        api_key: ApiKey = None,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/compare"),
        seed: int = 0,
    ) -> None:
        """Send one trace under each policy in turn, and say what choosing is worth against the best single mode."""
        console = results_console()
        found = Found()
        try:
            known = load_recipe(recipe)
            options = Options(
                base_url,
                bare_url,
                tuple(name.strip() for name in policies.split(",") if name.strip()),
                tuple(allow or ()),
                known,
                {LIGHT: rate_light or known.light_per_s, SATURATING: rate_saturating or known.saturating_per_s},
                {
                    LIGHT: requests_light or known.light_requests,
                    SATURATING: requests_saturating or known.saturating_requests,
                },
                rounds,
                budget_s,
                tokenizer,
                api_key,
                out,
                seed,
            )
            if not options.policies:
                raise CompareRefused("name at least one policy with --policies")
            interrupted = run_interruptible(_measure(options, found, console))
            _report(options, found, console)
        except (
            CompareRefused,
            NothingServed,
            OSError,
            OutputUnwritable,
            PromptError,
            RecipeRefused,
            ServerFault,
        ) as error:
            console.print(f"compare: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if found.failures:
            raise typer.Exit(1)
