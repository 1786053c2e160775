"""`replay ledger`: a server's logged decisions, asked again of other policies or of the same one."""

import copy
import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.status import Status
from rich.table import Table

from app.controller.trained_model import OnnxPredictor
from app.routing.mode_info import ModeInfo
from app.routing.policies import POLICY_NAMES
from app.routing.policies.learned import PredictorRefused
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from loadgen.console import results_console
from loadgen.interruption import EXIT_INTERRUPTED, signals_as_interrupts, without_ctrl_c
from loadgen.logged_decisions import LedgerUnreadable, RowRange, Shared, ranges, read_contexts, rows
from loadgen.policy_replay import LEARNED, Defaults, PairedMean, Replay, Tally
from loadgen.records import OutputUnwritable
from loadgen.servers import write_json

_DEFAULT_POLICIES = ("cost", "rules", "rules_published")
_ROWS_A_PIECE = 20_000
_SHOWN = 20


class FileUnusable(Exception):
    """A file given as an option cannot be read or is not of its form; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every process of a replay does."""

    ledger: Path
    policies: tuple[str, ...]
    defaults: Defaults
    verify: bool
    trained_model: Path | None = None

    def piece(self, span: RowRange) -> Tally:
        """Replays one piece. Raises LedgerUnreadable and FileUnusable."""
        predictor = None if self.trained_model is None else read_trained_model(self.trained_model)
        replay = Replay(self.policies, self.defaults, verify=self.verify, predictor=predictor)
        # A row makes dozens of short-lived records and no cycles: looking for some costs a fifth of the time.
        gc.disable()
        try:
            for row in rows(self.ledger, span):
                replay.add(row)
        finally:
            gc.enable()
        return replay.tally


def replay_all(job: Job, processes: int) -> Iterator[Tally]:
    """The tally so far, after each piece: one of its own, which stays whole whatever interrupts the next.

    Raises LedgerUnreadable and FileUnusable.
    """
    spans = ranges(job.ledger, _ROWS_A_PIECE)
    total = Tally(policies=job.piece(RowRange(0, -1)).policies)
    yield total
    for tally in _pieces(job, spans, min(processes, len(spans))):
        total = copy.deepcopy(total)
        total.merge(tally)
        yield total


def _pieces(job: Job, spans: Sequence[RowRange], processes: int) -> Iterator[Tally]:
    if processes <= 1:
        yield from map(job.piece, spans)
        return
    # Spawned: a fork would copy the terminal's drawing thread.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        with without_ctrl_c():
            pieces = [pool.submit(job.piece, span) for span in spans]
        try:
            for piece in pieces:
                yield piece.result()
        except BaseException:
            # Nobody waits for the pieces under way any more, each of which takes seconds.
            for worker in active_children():
                worker.terminate()
            raise


def read_profile(path: Path) -> Profile:
    """A profile for whatever model and hardware it was measured on. Raises FileUnusable."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise FileUnusable(f"{path} is no profile: {_words(error)}") from error


def read_settings(path: Path) -> RoutingSettings:
    """The routing settings as JSON. Raises FileUnusable."""
    try:
        return RoutingSettings.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise FileUnusable(f"{path} holds no routing settings: {_words(error)}") from error


@cache
def read_trained_model(path: Path) -> OnnxPredictor:
    """A trained model for whatever it was trained for; read once in each process, for it cannot be sent to another.

    Raises FileUnusable.
    """
    try:
        return OnnxPredictor(path)
    except OSError as error:
        raise FileUnusable(f"{path} is no trained model: {_words(error)}") from error
    except PredictorRefused as error:
        raise FileUnusable(str(error)) from error


def _words(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


class _ListedMode(msgspec.Struct):
    """A mode as `GET /v1/modes` lists it."""

    id: str
    engine: str
    weights: str
    lossless: bool
    prefix_reuse: bool = False
    engine_delta: dict[str, Any] = msgspec.field(default_factory=dict)

    def info(self) -> ModeInfo:
        speculative = self.engine_delta.get("speculative_config") is not None
        return ModeInfo(self.id, self.engine, self.weights, self.lossless, self.prefix_reuse, speculative)


class _Listed(msgspec.Struct):
    data: list[_ListedMode]


def read_modes(path: Path) -> tuple[ModeInfo, ...]:
    """Deployed modes: a list of their facts, or what `GET /v1/modes` answers. Raises FileUnusable."""
    try:
        content = path.read_bytes()
        if content.lstrip().startswith(b"["):
            return msgspec.json.decode(content, type=tuple[ModeInfo, ...])
        return tuple(item.info() for item in msgspec.json.decode(content, type=_Listed).data)
    except (OSError, msgspec.DecodeError) as error:
        raise FileUnusable(f"{path} holds no list of modes: {error}") from error


def _agreement_table(tally: Tally) -> Table:
    table = Table(title="Other policies on the logged decisions")
    for name in ("policy", "asked", "refused", "as executed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name, item in tally.policies.items():
        agreed = f"{100 * item.agreed / item.asked:.1f} %" if item.asked else ""
        table.add_row(name, str(item.asked), str(sum(item.refusals.values())), agreed)
    return table


def _cost_table(tally: Tally) -> Table:
    table = Table(title="Mean cost that the profile predicts, over decisions where both modes' is known")
    for name in ("policy", "", "its mode", "executed", "ratio", "decisions"):
        table.add_column(name, justify="left" if name in ("policy", "") else "right")
    for name, item in tally.policies.items():
        for quantity, found in (("latency (ms)", item.latency_ms), ("energy (J)", item.energy_j)):
            table.add_row(name, quantity, *_cost_words(found), str(found.n))
    return table


def _cost_words(found: PairedMean) -> tuple[str, str, str]:
    if not found.n:
        return "unknown", "unknown", ""
    ratio = f"{found.policy_sum / found.executed_sum:.3f}" if found.executed_sum else ""
    return f"{found.policy_sum / found.n:.4g}", f"{found.executed_sum / found.n:.4g}", ratio


def _choice_table(tally: Tally) -> Table:
    """Modes downwards: there are more of them than of policies."""
    counts = {"executed": tally.executed} | {name: item.choices for name, item in tally.policies.items()}
    table = Table(title="Choices by mode")
    table.add_column("mode")
    for name in counts:
        table.add_column(name, justify="right")
    for mode in sorted({mode for choices in counts.values() for mode in choices}):
        table.add_row(mode, *(str(choices.get(mode, 0)) for choices in counts.values()))
    return table


def _notes(tally: Tally) -> Iterator[str]:
    """What was left out, and why."""
    for name, item in tally.policies.items():
        yield from (f"{name}, {count} x: {why}" for why, count in item.failures.most_common())
        yield from (f"{name} refused, {count} x: {code}" for code, count in item.refusals.most_common())
    if tally.undecided:
        yield f"{tally.undecided} requests ended before a decision"
    if tally.damaged:
        yield f"{sum(tally.damaged.values())} rows are damaged and left out:"
        yield from (f"  {count} x: {why}" for why, count in tally.damaged.most_common(_SHOWN))


def _verify_notes(tally: Tally) -> Iterator[str]:
    yield f"verified {tally.verified} decisions: {tally.mismatched} came out otherwise"
    for item in tally.mismatches[:_SHOWN]:
        yield f"  {item.request_id} ({item.policy}): " + "; ".join(item.differences)
    if tally.mismatched > _SHOWN:
        yield f"  and {tally.mismatched - _SHOWN} more"
    if unverified := sum(tally.unverifiable.values()):
        yield f"not verified: {unverified} decisions"
    yield from (f"  {count} x: {why}" for why, count in tally.unverifiable.most_common())


def _as_json(tally: Tally, wall_s: float, interrupted: bool) -> dict[str, Any]:
    return {
        "command": "replay ledger",
        "interrupted": interrupted,
        "rows": tally.rows,
        "undecided": tally.undecided,
        "damaged": dict(tally.damaged),
        "wall_s": wall_s,
        "executed": dict(tally.executed),
        "policies": {name: item.as_json() for name, item in tally.policies.items()},
        "verified": tally.verified,
        "mismatched": tally.mismatched,
        "mismatches": [item._asdict() for item in tally.mismatches],
        "unverifiable": dict(tally.unverifiable),
    }


def _defaults(
    ledger: Path, profiles: Iterable[Path] = (), settings: Path | None = None, modes: Path | None = None
) -> Defaults:
    """Raises FileUnusable, LedgerUnreadable."""
    contexts = read_contexts(ledger)
    own = [profile for shared in contexts.values() if (profile := _profile_of(shared)) is not None]
    given = [read_profile(path) for path in profiles]
    return Defaults(
        # The one given first predicts the costs, else the one that was in use last.
        profile=next(iter([*given, *own[::-1]]), None),
        profiles={profile.version: profile for profile in (*own, *given)},
        settings=None if settings is None else read_settings(settings),
        modes=None if modes is None else read_modes(modes),
        contexts=contexts,
    )


def _profile_of(shared: Shared) -> Profile | None:
    content = bytes(shared.profile)
    try:
        return None if content == b"null" else Profile.model_validate_json(content)
    except ValidationError:
        return None


def _known(policies: Sequence[str]) -> tuple[str, ...]:
    """Raises BadParameter for a name that is no policy's."""
    for name in policies:
        if name not in POLICY_NAMES and not name.startswith("static:"):
            raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(POLICY_NAMES)}", param_hint="--policy")
    return tuple(dict.fromkeys(policies))


@dataclass(slots=True)
class Found:
    """Results so far, kept outside of the function that finds them, so that an interruption loses nothing."""

    tally: Tally = field(default_factory=Tally)
    wall_s: float = 0.0

    @property
    def rows_per_s(self) -> float:
        return self.tally.rows / self.wall_s if self.wall_s else 0.0


def _run(job: Job, processes: int, found: Found, status: Status) -> None:
    begin = time.perf_counter()
    for tally in replay_all(job, processes):
        found.tally, found.wall_s = tally, time.perf_counter() - begin
        status.update(f"{tally.rows:,} decisions, {found.rows_per_s:,.0f} rows/s")


def register(replay: typer.Typer) -> None:
    """Adds `ledger` to the group `replay`."""

    @replay.command()
    def ledger(
        path: Annotated[Path, typer.Argument(help="The server's ledger (SQLite); it may be running.")],
        policy: Annotated[
            list[str] | None, typer.Option(help=f"Policies to ask: {', '.join(POLICY_NAMES)}; may be repeated.")
        ] = None,
        profile: Annotated[
            list[Path] | None,
            typer.Option(help="Profile that predicts the costs; by default the ledger's own. The first one counts."),
        ] = None,
        settings: Annotated[Path | None, typer.Option(help="Routing settings, where the rows do not say.")] = None,
        trained_model: Annotated[
            Path | None, typer.Option(help="Trained model (ONNX) that decides as `learned`; no ledger holds one.")
        ] = None,
        modes: Annotated[Path | None, typer.Option(help="Modes, as of /v1/modes, where the rows do not say.")] = None,
        verify: Annotated[bool, typer.Option("--verify", help="Each decision must come out again as logged.")] = False,
        processes: Annotated[int, typer.Option(min=1, help="Processes to share the work.")] = min(
            2, os.cpu_count() or 1
        ),
        out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    ) -> None:
        """What other policies would have done with the decisions of a ledger, and at what predicted cost.

        Exit status 1: with --verify some decision came out otherwise, or none could be verified. 130: interrupted; the
        figures are of the rows replayed until then.
        """
        console = results_console()
        defaults = (*_DEFAULT_POLICIES, LEARNED) if trained_model else _DEFAULT_POLICIES
        names = _known(policy or (() if verify else defaults))
        if LEARNED in names and trained_model is None:
            raise typer.BadParameter("learned needs --trained-model FILE", param_hint="--policy")
        found, priced, interrupted = Found(), True, False
        try:
            with signals_as_interrupts(), console.status("reading") as status:
                job = Job(path, names, _defaults(path, profile or (), settings, modes), verify, trained_model)
                priced = job.defaults.profile is not None
                _run(job, processes, found, status)
        except KeyboardInterrupt:
            interrupted = True
        except (FileUnusable, LedgerUnreadable, BrokenProcessPool) as error:
            console.print(f"replay: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        tally = found.tally
        if names:
            for table in (_agreement_table(tally), _cost_table(tally), _choice_table(tally)):
                console.print(table)
            if not priced:
                console.print("Without --profile FILE there are no predicted costs, and `cost` decides as `rules` do.")
        for line in (*_notes(tally), *(_verify_notes(tally) if verify else ())):
            console.print(line, markup=False, highlight=False)
        console.print(f"{tally.rows:,} rows in {found.wall_s:.1f} s: {found.rows_per_s:,.0f} rows/s", highlight=False)
        if out is not None:
            _write(out, _as_json(tally, found.wall_s, interrupted), console)
        if interrupted:
            console.print("replay: interrupted; the figures are of the rows replayed until then.", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED)
        if verify and not tally.verified:
            console.print("replay: no decision could be verified", style="red", markup=False)
            raise typer.Exit(1)
        if tally.mismatched:
            raise typer.Exit(1)


def _write(out: Path, result: dict[str, Any], console: Console) -> None:
    try:
        write_json(out, result)
    except OutputUnwritable as error:
        console.print(f"replay: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
