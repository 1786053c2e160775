"""Shows what the preparation does and how long each step took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance: TypeAlias = Callable[[float, float], None]
"""Takes how much of a step is done, and how much there is in all, in any one unit."""


class Steps:
    """A bar per step on a terminal, a line per step elsewhere; a step's seconds stay on the screen either way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, title: str) -> Iterator[Advance]:
        """Show a step while the block runs; the bar pulses until the yielded function is first called."""
        started_s = time.monotonic()
        task = self._progress.add_task(title, total=None)
        yield lambda done, total: self._progress.update(task, completed=done, total=total)
        self._progress.update(task, completed=1, total=1)
        if self._progress.disable:
            self.say(f"{title}: {time.monotonic() - started_s:.1f} s")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, soft_wrap=True)
