"""`idle-cost`: what the application's processes cost while nobody asks anything, and what each engine holds."""

import asyncio
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from rich.console import Console
from rich.table import Table

from app.launch import FAST_PATH
from loadgen.client import OpenAIClient
from loadgen.console import results_console
from loadgen.options import finite
from loadgen.process_tree import ProcessCost, measure
from loadgen.records import OutputUnwritable, require_writable
from loadgen.servers import StartFailed, answers, free_port, running, write_json

_MIB = 2**20
_EMPTY_START_S = 180.0
_SETTLE_S = 15.0
"""After a start, until what only starting costs is over."""

# Ray's processes by what their command line contains; the replicas and the engines below them are its descendants.
_RAY_MARKS = ("/raylet/raylet", "/gcs/gcs_server", "ray::", "ray/dashboard", "ray/_private", "ray/autoscaler")
_REPLICA_MARK = "ServeReplica"


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Processes that belong together: an engine's replica with its engine processes, or everything else."""

    name: str
    cpu_s_per_s: float
    rss_bytes: int
    pss_bytes: int | None
    processes: int


def ray_processes() -> list[int]:
    """Process ids of all of Ray's processes of this user's machine that can be read."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(mark in line for mark in _RAY_MARKS):
            found.append(process.info["pid"])
    return found


def group(costs: Sequence[ProcessCost]) -> list[Group]:
    """Sums by the Serve replica that a process is or descends from; the rest is `ray and the rest`.

    Sums of RSS count shared pages once for every process; PSS does not, and is the one to compare with a budget.
    """
    by_pid = {cost.pid: cost for cost in costs}
    members: dict[str, list[ProcessCost]] = {}
    for cost in costs:
        members.setdefault(_replica_of(cost, by_pid) or "ray and the rest", []).append(cost)
    return [_sum(name, items) for name, items in sorted(members.items())]


def _replica_of(cost: ProcessCost, by_pid: dict[int, ProcessCost]) -> str | None:
    seen: set[int] = set()
    current: ProcessCost | None = cost
    while current is not None and current.pid not in seen:
        if _REPLICA_MARK in current.name:
            return current.name.split(_REPLICA_MARK, 1)[1].lstrip(":")
        seen.add(current.pid)
        current = by_pid.get(current.parent_pid)
    return None


def _sum(name: str, costs: Iterable[ProcessCost]) -> Group:
    items = list(costs)
    pss = [item.pss_bytes for item in items if item.pss_bytes is not None]
    return Group(
        name,
        sum(item.cpu_s_per_s for item in items),
        sum(item.rss_bytes for item in items),
        sum(pss) if len(pss) == len(items) else None,  # a sum without some of its parts would be a wrong figure
        len(items),
    )


def _cost_when_empty(seconds: float) -> list[ProcessCost]:
    """Costs of an application without deployments of ours, started as `make serve` does it. Raises StartFailed."""
    with tempfile.TemporaryDirectory() as folder:
        port, config, log = free_port(), Path(folder, "serve.yaml"), Path(folder, "serve.log")
        application = {"name": "empty", "route_prefix": "/", "import_path": "loadgen.empty_app:application"}
        http = {"host": "127.0.0.1", "port": port}
        config.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        return asyncio.run(_watch_started(command, log, f"http://127.0.0.1:{port}", seconds))


async def _watch_started(command: list[str], log: Path, url: str, seconds: float) -> list[ProcessCost]:
    async with OpenAIClient(url) as client:
        ready = functools.partial(answers, client)
        async with running(command, {**FAST_PATH, **os.environ}, log, ready, _EMPTY_START_S):
            await asyncio.sleep(_SETTLE_S)
            return measure(ray_processes(), seconds)


class AlreadyRunning(Exception):
    """What is to be measured alone would not be alone."""


class EarlierUnreadable(Exception):
    """The earlier result to compare with is missing or is no result of this command."""


def cpu_of(path: Path) -> float:
    """Total CPU seconds per second of an earlier result. Raises EarlierUnreadable."""
    try:
        return float(json.loads(path.read_text())["total"]["cpu_s_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EarlierUnreadable(f"{path} is no result of idle-cost: {error}") from error


_COLUMNS: tuple[tuple[str, Callable[[Group], str]], ...] = (
    ("CPU, % of one core", lambda item: f"{100 * item.cpu_s_per_s:.2f}"),
    ("RSS MiB", lambda item: f"{item.rss_bytes / _MIB:.0f}"),
    ("PSS MiB", lambda item: "unreadable" if item.pss_bytes is None else f"{item.pss_bytes / _MIB:.0f}"),
    ("processes", lambda item: str(item.processes)),
)


def _table(heading: str, groups: Sequence[Group]) -> Table:
    table = Table(title=heading)
    table.add_column("")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for item in groups:
        table.add_row(item.name, *(words(item) for _, words in _COLUMNS))
    return table


def register(app: typer.Typer) -> None:
    """Adds `idle-cost`."""

    @app.command("idle-cost")
    def idle_cost(
        seconds: Annotated[
            float, typer.Option(callback=finite, min=0.1, help="How long to watch; send nothing meanwhile.")
        ] = 30.0,
        pid: Annotated[list[int] | None, typer.Option(help="Roots to watch; all of Ray by default.")] = None,
        empty: Annotated[
            bool, typer.Option("--empty", help="Start a Serve application that does nothing, and watch that.")
        ] = False,
        minus: Annotated[Path | None, typer.Option(help="Earlier result, such as of an empty Serve app.")] = None,
        processes: Annotated[bool, typer.Option(help="Show every process too.")] = True,
        out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    ) -> None:
        """CPU and memory of the application's process trees while idle, by engine and by process."""
        console = results_console()
        roots = pid or ray_processes()
        try:
            earlier = None if minus is None else cpu_of(minus)
            if out is not None:
                require_writable(out)
            if empty and roots:
                raise AlreadyRunning("an application of Ray runs here: stop it first, --empty starts one of its own")
            with console.status(f"watching for {seconds:g} s"):
                costs = _cost_when_empty(seconds) if empty else measure(roots, seconds)
        except (AlreadyRunning, EarlierUnreadable, OutputUnwritable, StartFailed) as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(2) from error
        if not costs:
            console.print("no process to watch: is the application running? (--pid names its roots)", style="red")
            raise typer.Exit(2)
        if processes:
            rows = sorted(costs, key=lambda cost: -cost.cpu_s_per_s)
            console.print(_table("Processes", [_sum(f"{cost.pid} {cost.name}"[:70], [cost]) for cost in rows]))
        groups, total = group(costs), _sum("total", costs)
        console.print(_table(f"Idle for {seconds:g} s", [*groups, total]))
        if earlier is not None:
            console.print(f"beyond {minus}: {100 * (total.cpu_s_per_s - earlier):.2f} % of one core")
        if out is not None:
            _write(out, seconds, costs, groups, total, console)


def _write(
    out: Path, seconds: float, costs: list[ProcessCost], groups: list[Group], total: Group, console: Console
) -> None:
    result: dict[str, Any] = {
        "command": "idle-cost",
        "seconds": seconds,
        "total": dataclasses.asdict(total),
        "groups": [dataclasses.asdict(item) for item in groups],
        "processes": [dataclasses.asdict(cost) for cost in costs],
    }
    try:
        write_json(out, result)
    except OutputUnwritable as error:
        console.print(f"idle-cost: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
