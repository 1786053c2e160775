"""An engine's processes are found by their marker and end when the replica ends, even by SIGKILL."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil

from app.engines.processes import MARKER, EngineProcesses, find_marked, kill_marked

SLEEPER = "import time; time.sleep(600)"


def spawn(marker, code=SLEEPER):
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARKER: marker})


def wait_until(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_sigkilled_replica_leaves_no_engine_behind():
    marker = uuid.uuid4().hex
    replica = spawn(
        marker,
        textwrap.dedent(f"""
            import os, subprocess, sys, time
            from app.engines.processes import start_reaper
            keep = start_reaper({marker!r})
            # The engine starts a worker in a session of its own, out of reach of a process group.
            engine = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], "
            subprocess.Popen([sys.executable, "-c", engine + "start_new_session=True).wait()"])
            time.sleep(600)
        """),
    )
    try:
        wait_until(lambda: len(find_marked(marker)) == 3)
        replica.kill()
        replica.wait()
        wait_until(lambda: not find_marked(marker))
    finally:
        kill_marked(marker)


def test_vitals_tell_running_stopped_and_gone():
    marker = uuid.uuid4().hex
    child = spawn(marker)
    try:
        wait_until(lambda: find_marked(marker))
        processes = EngineProcesses(marker)
        assert processes.ids == (child.pid,)
        assert processes.vitals().stopped == processes.vitals().gone == ()
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: processes.vitals().stopped == (child.pid,))
        child.kill()
        wait_until(lambda: processes.vitals().gone == (child.pid,))
    finally:
        child.kill()
        child.wait()


def test_other_processes_are_spared():
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    children = [spawn(mine), spawn(other)]
    try:
        wait_until(lambda: find_marked(mine) and find_marked(other))
        assert kill_marked(mine) == 1
        assert psutil.pid_exists(children[1].pid)
        assert find_marked(other)
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_memory_of_this_process_is_counted():
    resident, peak = EngineProcesses(uuid.uuid4().hex).memory_bytes()
    assert 0 < resident <= peak
