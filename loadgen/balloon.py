"""A process that holds a share of the GPU's memory, so that engines are short of it.

It is a process of its own, since a client that used CUDA would hold memory of its own accord. It waits for the end of
its input, which comes when its parent lets go and also when its parent is killed.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Protocol

_COMMAND = (sys.executable, "-m", "loadgen.balloon")
_START_S, _END_S = 120.0, 20.0
_HELD, _REFUSED = "held", "refused"
_GIB = 2**30


class BalloonRefused(Exception):
    """The memory cannot be held; the message says why."""


class Allocator(Protocol):
    """Where the memory comes from."""

    def hold(self, share: float) -> int:
        """Holds `share` (0..1) of the device's memory while this object lives; bytes. Raises BalloonRefused."""


class CudaAllocator:
    """Memory of the first visible NVIDIA GPU, through PyTorch."""

    def hold(self, share: float) -> int:
        try:
            import torch
        except ImportError as error:
            raise BalloonRefused("holding GPU memory needs PyTorch, which is not installed here") from error
        if not torch.cuda.is_available():
            raise BalloonRefused("there is no CUDA device on this machine, and a balloon must be where the engines are")
        free, total = torch.cuda.mem_get_info()
        wanted = int(share * total)
        if wanted > free:
            raise BalloonRefused(f"{wanted / _GIB:.1f} GiB are wanted and {free / _GIB:.1f} GiB are free")
        try:
            self._held = torch.empty(wanted, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:  # out of memory after all: somebody was faster
            raise BalloonRefused(str(error).partition("\n")[0]) from error
        return wanted


def hold(allocator: Allocator, share: float, lease: IO[str], told: IO[str]) -> int:
    """The balloon's own process: says what it holds on `told`, holds it until `lease` ends; an exit status."""
    try:
        held_bytes = allocator.hold(share)
    except BalloonRefused as refused:
        print(_REFUSED, refused, file=told, flush=True)
        return 1
    print(_HELD, held_bytes, file=told, flush=True)
    lease.read()
    return 0


ENDED_EARLY = "The balloon ended before the run did: memory was not held to the end."


@dataclass(frozen=True, slots=True)
class Balloon:
    """A balloon that holds memory, or did."""

    held_bytes: int
    process: asyncio.subprocess.Process

    @property
    def holds(self) -> bool:
        """False when its process ended before it was let go."""
        return self.process.returncode is None

    def as_json(self, held_to_the_end: bool | None) -> dict[str, int | bool | None]:
        return {"held_bytes": self.held_bytes, "held_to_the_end": held_to_the_end}


@asynccontextmanager
async def balloon(share: float, command: Sequence[str] = _COMMAND) -> AsyncIterator[Balloon]:
    """Holds `share` (0..1) of the device's memory while the block runs. Raises BalloonRefused."""
    process = await asyncio.create_subprocess_exec(
        *command,
        str(share),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C is for the run: the balloon ends with it, not before it.
        start_new_session=True,
    )
    try:
        yield Balloon(await _held_bytes(process), process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _held_bytes(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
    except TimeoutError as error:
        raise BalloonRefused(f"the balloon's process did not hold its memory within {_START_S:g} s") from error
    word, _, rest = line.decode(errors="replace").strip().partition(" ")
    if word != _HELD:
        raise BalloonRefused(rest if word == _REFUSED else "the balloon's process ended without holding anything")
    return int(rest)


if __name__ == "__main__":
    sys.exit(hold(CudaAllocator(), float(sys.argv[1]), sys.stdin, sys.stdout))
