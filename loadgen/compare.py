"""`compare`: policies side by side on one trace recipe, interleaved, against the best single mode and an oracle."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.routing.tags import tag_of
from loadgen.arrivals import drive_open
from loadgen.client import INCLUDE_HEADER, Call, OpenAIClient, ServerFault
from loadgen.comparison import (
    LIGHT,
    SATURATING,
    STATIC,
    Row,
    rate_summary,
    sentences,
    training_rows,
)
from loadgen.energy_facts import EnergySource, accepts_include, energy_of, request_record
from loadgen.interruption import EXIT_INTERRUPTED, run_interruptible
from loadgen.prompts import ChatTokenizer, PromptError, PromptMaker
from loadgen.recipe import Recipe, RecipeRefused, items_of, load_recipe, trace_of
from loadgen.records import Outcome, OutputUnwritable, RecordWriter, RequestRecord
from loadgen.server_facts import NothingServed, engines, first_model, tokenizer_folder
from loadgen.servers import write_json
from loadgen.workloads import Item, body_of

POLICY_HEADER = "x-modeswitch-policy"
DECISION = "decision"
BARE = "bare"
EVERY_MODE = "static:all"
_LEAD_S = 0.1


class CompareRefused(Exception):
    """The comparison cannot be made as it was asked for; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; see their help texts."""

    base_url: str
    bare_url: str | None
    policies: tuple[str, ...]
    allow: tuple[str, ...]
    recipe: Recipe
    rates_per_s: Mapping[str, float]
    requests: Mapping[str, int]
    rounds: int
    budget_s: float
    tokenizer: Path | None
    api_key: str | None
    out: Path
    seed: int


@dataclasses.dataclass(slots=True)
class Found:
    """Results so far, kept outside of the coroutine, so that an interruption loses nothing."""

    policies: tuple[str, ...] = ()
    rows: list[Row] = dataclasses.field(default_factory=list)
    features: dict[tuple[str, int, int], dict[str, Any]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    ended: str = "interrupted"
    engines: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace."""

    policy: str
    rate: str
    round: int


def runs_of(policies: Sequence[str], rounds: int, seed: int) -> list[list[Run]]:
    """Blocks of runs that share a trace: both rates in every round, the policies in a fresh random order in each."""
    blocks = []
    for number in range(rounds):
        for rate in (LIGHT, SATURATING):
            order = list(policies)
            random.Random(f"compare/{seed}/{number}/{rate}").shuffle(order)
            blocks.append([Run(policy, rate, number) for policy in order])
    return blocks


@dataclasses.dataclass(slots=True)
class _Comparison:
    """The running comparison: one run at a time."""

    options: Options
    client: OpenAIClient
    bare: OpenAIClient | None
    served: str
    bare_model: str
    maker: PromptMaker
    writer: RecordWriter
    found: Found
    decisions: bool
    """The server tells its decisions to a client that asks."""
    records_kept: bool
    """The server keeps a record of each request, with its energy."""
    salt: str

    async def run(self, run: Run, on_end: Callable[[], None]) -> None:
        """One run. Cancelled, it gives up what is under way and keeps what has ended."""
        options = self.options
        await self.client.reset_prefix_cache()
        seed = options.seed + run.round
        slots = trace_of(options.recipe, options.rates_per_s[run.rate], options.requests[run.rate], seed)
        items = items_of(options.recipe, slots, self.maker, seed, f"{self.salt}/{run}")
        calls = [self._call(run.policy, item) for item in items]
        records = [RequestRecord(index=slot.index, workload=slot.name) for slot in slots]
        client = self.client if run.policy != BARE or self.bare is None else self.bare
        origin = time.perf_counter() + _LEAD_S

        async def send(index: int, due: float | None) -> None:
            records[index].scheduled_s = slots[index].due_s
            try:
                await client.send(calls[index], records[index], due=due, origin=origin)
            finally:
                self.writer.write(records[index])
                on_end()

        try:
            await drive_open([slot.due_s for slot in slots], send, origin)
        finally:
            sent = [record for record in records if record.scheduled_s is not None]
            self.found.rows += [_row(run, items[record.index], record) for record in sent]
            self._note_failures(run, sent)
        await self._settle(run, records)

    def _call(self, policy: str, item: Item) -> Call:
        if policy == BARE:
            return Call.of(body_of(item, self.bare_model, stream=True, exact_output=True))
        call = Call.of(body_of(item, self.served, stream=True, exact_output=True))
        asked = {POLICY_HEADER: policy} | ({INCLUDE_HEADER: DECISION} if self.decisions else {})
        return dataclasses.replace(call, headers={**call.headers, **asked})

    def _note_failures(self, run: Run, records: Sequence[RequestRecord]) -> None:
        bad = [record for record in records if record.outcome not in (Outcome.OK, Outcome.INTERRUPTED)]
        if bad:
            example = f"{bad[0].outcome}: {bad[0].error}"
            self.found.failures.append(
                f"round {run.round + 1}, {run.rate}, {run.policy}: {len(bad)} of {len(records)} failed ({example})"
            )

    async def _settle(self, run: Run, records: Sequence[RequestRecord]) -> None:
        """Energy and features, which the server knows once a request is over. Asked for after the run, not in it."""
        source = EnergySource(self.records_kept and run.policy != BARE)
        rows = {(row.policy, row.rate, row.round, row.index): place for place, row in enumerate(self.found.rows)}
        for record in records:
            if record.outcome is not Outcome.OK:
                continue
            joules = await source.joules(self.client, record)
            # Where one request's energy is not told, the others' will not be, and each look takes time.
            source.offered = joules is not None
            place = rows[run.policy, run.rate, run.round, record.index]
            self.found.rows[place] = dataclasses.replace(self.found.rows[place], energy_j=joules)
            if run.policy.startswith(STATIC):
                features = await self._features(record)
                if features is not None:
                    self.found.features.setdefault((run.rate, run.round, record.index), features)

    async def _features(self, record: RequestRecord) -> dict[str, Any] | None:
        decision = (record.extras or {}).get(DECISION)
        features = decision.get("features") if isinstance(decision, dict) else None
        if features is None:
            features = (await request_record(self.client, record) or {}).get("features")
        return features if isinstance(features, dict) and features else None

    async def check(self, policy: str) -> tuple[str, ...]:
        """One request, which also warms up; the reasons why the server does not do as it is asked, if it does not."""
        recipe = self.options.recipe
        slot = trace_of(recipe, 1.0, 1, self.options.seed)[0]
        item = items_of(recipe, [slot], self.maker, self.options.seed, f"{self.salt}/warm-up/{policy}")[0]
        item = dataclasses.replace(item, output_tokens=4)
        client = self.bare if policy == BARE and self.bare is not None else self.client
        record = await client.send(self._call(policy, item))
        if record.outcome is not Outcome.OK:
            return (f"{policy}: {record.outcome}: {record.error}",)
        if policy.startswith(STATIC) and record.mode not in (None, policy.removeprefix(STATIC)):
            return (f"{policy}: the server used {record.mode} instead",)
        used = (record.extras or {}).get(DECISION)
        if isinstance(used, dict) and policy != BARE and used.get("policy") != policy:
            stood_in = used.get("stands_in_for")
            why = "; is a profile loaded?" if stood_in == policy else "; does it allow clients to name a policy?"
            return (f"{policy}: the server decided by {used.get('policy')}{why}",)
        return ()


def _row(run: Run, item: Item, record: RequestRecord) -> Row:
    late_ms = 1000 * (record.sent_s - (record.scheduled_s or 0.0))
    return Row(
        policy=run.policy,
        name=record.workload,
        tag=tag_of(item.messages[-1]["content"]).tag.value,
        mode=record.mode,
        rate=run.rate,
        round=run.round,
        index=record.index,
        status=record.outcome.value,
        latency_ms=record.total_ms + max(0.0, late_ms),
        ttft_ms=record.ttft_ms,
        energy_j=None,
        output_tokens=record.output_tokens,
        started_s=record.scheduled_s or 0.0,
    )


async def _policies(options: Options, client: OpenAIClient) -> tuple[str, ...]:
    """The policies that were asked for, every mode's written out. An alias serves as its mode does: left out."""
    names: list[str] = []
    for policy in options.policies:
        if policy == EVERY_MODE:
            data = (await client.get_json("/v1/modes", timeout_s=30.0)).get("data") or ()
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
        comparison = _Comparison(
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
            comparison.records_kept = await _keeps_energy(client, served)
            refused = [reason for policy in found.policies for reason in await comparison.check(policy)]
        if refused:
            raise CompareRefused("the server does not serve these policies:\n  " + "\n  ".join(refused))
        await _all_runs(comparison, began, console)
        found.engines = await engines(client)


async def _keeps_energy(client: OpenAIClient, served: str) -> bool:
    """True when a finished request's record tells its energy."""
    body = {"model": served, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    record = await client.send(Call.of(body))
    if record.outcome is not Outcome.OK:
        return False
    return energy_of(await request_record(client, record)) is not None


async def _all_runs(comparison: _Comparison, began: float, console: Console) -> None:
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


def _write(options: Options, found: Found) -> dict[str, Any]:
    """Both files, whole, after each run: an interruption of any kind loses no run that has ended."""
    summary = summary_of(options, found)
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
    return summary


def _table(rate: str, rate_per_s: float, found: Mapping[str, Any]) -> Table:
    table = Table(title=f"{rate.capitalize()}: {rate_per_s:g} requests/s, {found['compared_requests']} compared")
    table.add_column("policy", no_wrap=True)
    for name in ("mean ms", "P95 ms", "tokens/s", "J", "errors", "to best"):
        table.add_column(name, justify="right")
    against = found.get("against_best_static", {})
    for policy, one in sorted(found["policies"].items(), key=lambda item: item[1]["mean_ms"]):
        best = policy == found.get("best_static")
        ratio = against.get(policy, {}).get("latency_ratio")
        table.add_row(
            policy,
            *(_figure(one[key], digits) for key, digits in (("mean_ms", 0), ("p95_ms", 0), ("tokens_per_s", 1))),
            _figure(one["energy_j"], 2),
            str(one["errors"]),
            "best" if best else "" if ratio is None else f"{ratio['estimate']:.2f}",
        )
    if "oracle_ms" in found:
        table.add_row("hindsight oracle", f"{found['oracle_ms']:.0f}")
        table.add_row("best mode by class", f"{found['class_oracle_ms']:.0f}")
    return table


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _report(options: Options, found: Found, console: Console) -> None:
    summary = _write(options, found)
    for rate in (LIGHT, SATURATING):
        if summary[rate] is not None:
            console.print(_table(rate, options.rates_per_s[rate], summary[rate]))
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
        rate_light: Annotated[float | None, typer.Option(min=1e-6, help="Requests/s; the recipe's by default.")] = None,
        rate_saturating: Annotated[float | None, typer.Option(min=1e-6, help="Requests/s, as above.")] = None,
        requests_light: Annotated[int | None, typer.Option(min=1, help="In each run; the recipe's by default.")] = None,
        requests_saturating: Annotated[int | None, typer.Option(min=1, help="In each run, as above.")] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Each has both rates, with prompts of its own.")] = 2,
        budget_s: Annotated[float, typer.Option(min=1.0, help="No block begins that would end after it.")] = 1500.0,
        allow: Annotated[
            list[str] | None,
            typer.Option(help="Modes that may be the best static mode and the oracle's; all by default."),
        ] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Model folder; the server's by default.")] = None,
        api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None,
        out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/compare"),
        seed: int = 0,
    ) -> None:
        """Send one trace under each policy in turn, and say what choosing is worth against the best single mode."""
        console = Console()
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
