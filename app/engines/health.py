"""Whether a running engine still makes progress. Pure: readings in, verdict out.

A time limit alone would kill an engine that works through a flood of long prompts. So an engine counts as dead only
when a process of its own is gone or stopped, or when it has work and neither takes steps nor uses the CPU. A hung
kernel may spin, hence the second, long limit on steps alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.engines.processes import Vitals

_LEAST_CPU_SECONDS = 0.05
"""An idle process wakes up now and then; less than this between two readings is no work."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is remembered from reading to reading. Times are monotonic seconds."""

    steps: int
    cpu_seconds: float
    stepped_at_s: float
    moved_at_s: float
    stopped_readings: int = 0


def observe(last: Progress | None, now_s: float, steps: int, has_work: bool, vitals: Vitals) -> Progress:
    """The new memory after a reading. An engine without work counts as moving."""
    if last is None:
        return Progress(steps, vitals.cpu_seconds, now_s, now_s, int(bool(vitals.stopped)))
    stepped = steps != last.steps or not has_work
    moved = stepped or vitals.cpu_seconds - last.cpu_seconds >= _LEAST_CPU_SECONDS
    return replace(
        last,
        steps=steps,
        cpu_seconds=vitals.cpu_seconds if moved else last.cpu_seconds,
        stepped_at_s=now_s if stepped else last.stepped_at_s,
        moved_at_s=now_s if moved else last.moved_at_s,
        stopped_readings=last.stopped_readings + 1 if vitals.stopped else 0,
    )


def failure(
    progress: Progress, now_s: float, vitals: Vitals, stalled_after_s: float, stuck_after_s: float
) -> str | None:
    """Why the engine counts as dead, or None while it does not."""
    if vitals.gone:
        return f"engine process {_list(vitals.gone)} ended"
    # Twice in a row: a debugger or a checkpoint tool may stop a process for a moment.
    if progress.stopped_readings >= 2:
        return f"engine process {_list(vitals.stopped)} is stopped"
    if now_s - progress.moved_at_s >= stalled_after_s:
        return f"no progress with requests waiting for {now_s - progress.moved_at_s:.0f} s"
    if now_s - progress.stepped_at_s >= stuck_after_s:
        return f"no step finished for {now_s - progress.stepped_at_s:.0f} s"
    return None


def _list(pids: tuple[int, ...]) -> str:
    return ", ".join(map(str, pids))
