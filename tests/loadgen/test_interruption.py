import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from loadgen.interruption import run_interruptible, without_ctrl_c
from loadgen.records import OutputUnwritable
from tests.loadgen.conftest import finished


def test_a_failure_among_tasks_that_run_together_is_one_failure() -> None:
    async def fails() -> None:
        raise OutputUnwritable("no room")

    async def together() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(nested())

    async def nested() -> None:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fails())
            inner.create_task(asyncio.sleep(60))

    with pytest.raises(OutputUnwritable, match="no room"):
        run_interruptible(together())
    assert run_interruptible(asyncio.sleep(0)) is False


async def interrupted(program: str) -> tuple[int, str]:
    """Exit status and words of a program that gets Ctrl-C once it has printed that it has begun."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "begun\n"
        process.send_signal(signal.SIGINT)
        words = await finished(process)
    return process.returncode, words


async def test_a_second_ctrl_c_does_not_cost_what_the_first_kept() -> None:
    program = """
        import asyncio, os, signal
        from loadgen.interruption import run_interruptible

        async def main():
            print("begun", flush=True)
            await asyncio.sleep(60)

        interrupted = run_interruptible(main())
        os.kill(os.getpid(), signal.SIGINT)
        print("written", interrupted, flush=True)
    """
    assert await interrupted(program) == (0, "written True\n")


def test_processes_that_are_started_without_ctrl_c_outlive_it() -> None:
    program = """
        import sys
        print("begun", flush=True)
        sys.stdin.readline()
        print("still here", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with without_ctrl_c():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        words, _ = process.communicate("go on\n", timeout=60)
    assert (process.returncode, words) == (0, "still here\n")


async def test_a_second_ctrl_c_outside_of_a_loop_is_ignored_too() -> None:
    program = """
        import os, signal, time
        from loadgen.interruption import signals_as_interrupts

        try:
            with signals_as_interrupts():
                print("begun", flush=True)
                time.sleep(3600)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            print("written", flush=True)
    """
    assert await interrupted(program) == (0, "written\n")


def test_ctrl_c_before_a_command_begins_is_no_crash(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A module of the program is replaced by one that is interrupted while it is imported."""
    folder = tmp_path_factory.mktemp("instead")
    (folder / "uvloop.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(folder), *sys.path])
    found = subprocess.run(
        [sys.executable, "-m", "loadgen", "run"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert (found.returncode, found.stderr) == (130, "interrupted before it began\n")
