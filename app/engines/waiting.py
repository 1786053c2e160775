"""How an engine's processes wait for one another on a CPU, as a vLLM plugin.

vLLM's processes pass each step through shared memory, and a reader spins for up to a second before it sleeps
(`vllm.distributed.device_communicators.shm_broadcast.SpinCondition`). Beside a GPU that costs nothing. On a CPU it
takes a core from the threads that compute the very step it waits for; asleep, it is woken by a socket within 0.1 ms.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

_Spinning = shm_broadcast.SpinCondition


class SleepingCondition(_Spinning):  # type: ignore[misc, valid-type]
    """Sleeps at once; the socket that wakes it is the one vLLM itself relies on after its second of spinning."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "busy_loop_s": 0.0})


def register() -> None:
    """Called in each of vLLM's processes; without effect beside a GPU."""
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition = SleepingCondition
