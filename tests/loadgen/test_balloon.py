import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadgen.balloon import BalloonRefused, balloon

# A balloon's process as it is, but for where its memory comes from.
FAKE = """
import sys
from loadgen.balloon import BalloonRefused, hold

class Thousand:
    def hold(self, share):
        if share > 0.5:
            raise BalloonRefused("only half of it is free")
        return int(1000 * share)

sys.exit(hold(Thousand(), float(sys.argv[1]), sys.stdin, sys.stdout))
"""
COMMAND = (sys.executable, "-c", FAKE)
PARENT = """
import asyncio, sys
from loadgen.balloon import balloon

async def main():
    async with balloon(0.25, sys.argv[1:]) as held:
        print(held.process.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_it_holds_its_share_until_it_is_let_go() -> None:
    async with balloon(0.25, COMMAND) as held:
        assert held.held_bytes == 250
        assert held.holds
        assert psutil.pid_exists(held.process.pid)
    assert held.process.returncode == 0


async def test_a_refusal_says_why() -> None:
    with pytest.raises(BalloonRefused, match="only half of it is free"):
        async with balloon(0.9, COMMAND):
            pytest.fail("nothing is held")
    with pytest.raises(BalloonRefused, match="without holding anything"):
        async with balloon(0.9, (sys.executable, "-c", "print('Traceback')")):
            pytest.fail("nothing is held")


async def test_it_ends_with_the_run_that_is_given_up() -> None:
    begun = asyncio.Event()
    pids: list[int] = []

    async def run() -> None:
        async with balloon(0.25, COMMAND) as held:
            pids.append(held.process.pid)
            begun.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pids[0])


async def test_one_that_was_killed_no_longer_holds() -> None:
    async with balloon(0.25, COMMAND) as held:
        held.process.kill()
        await held.process.wait()
        assert not held.holds


@pytest.mark.timeout(60)
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, *COMMAND], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    # Whoever inherits it reaps it; the test's time limit is the only one.
    psutil.wait_procs([child])
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
