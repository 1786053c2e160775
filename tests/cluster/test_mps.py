"""The script for CUDA MPS, with a daemon played by a script of the test's."""

import os
import stat
import subprocess

import pytest

from app.config import load_settings
from app.engines.environment import engine_environment

DAEMON = """#!/usr/bin/env bash
# With -d it starts; otherwise it reads a command, as NVIDIA's does.
state="$CUDA_MPS_PIPE_DIRECTORY/control"
if [ "${1:-}" = -d ]; then
    echo "$CUDA_DEVICE_ORDER" > "$state"
    exit 0
fi
read -r command
[ -e "$state" ] || exit 1
case "$command" in
get_server_list) echo 4711 ;;
quit) rm "$state" ;;
*) exit 2 ;;
esac
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "bin").mkdir()
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe of mine"),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log"),
    }


@pytest.fixture
def mps(cluster, environment):
    def run(command):
        return subprocess.run([cluster / "mps.sh", command], env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def driver(tmp_path, environment):
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.write_text(DAEMON)
    program.chmod(0o755)


def test_it_is_a_script_that_bash_reads(cluster):
    assert subprocess.run(["bash", "-n", cluster / "mps.sh"]).returncode == 0


def test_it_starts_once_tells_and_ends(mps, driver, tmp_path):
    assert mps("status").returncode == 1
    assert mps("start").returncode == 0
    assert "already" in mps("start").stdout
    told = mps("status")
    assert (told.returncode, "4711" in told.stdout) == (0, True)
    assert mps("stop").returncode == 0
    assert mps("status").returncode == 1
    assert mps("stop").returncode == 0


def test_nobody_else_reaches_the_pipes_and_gpus_are_counted_as_engines_count_them(mps, driver, tmp_path):
    mps("start")
    pipe = tmp_path / "pipe of mine"
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o700
    engine = engine_environment(load_settings({"preset": "a100-40gb"}), "fp16")
    assert (pipe / "control").read_text().strip() == engine["CUDA_DEVICE_ORDER"]


def test_a_shell_learns_where_the_pipes_are(mps, environment):
    shell = 'eval "$0"; printf %s "$CUDA_MPS_PIPE_DIRECTORY"'
    told = subprocess.run(
        ["bash", "-c", shell, mps("env").stdout], capture_output=True, text=True, env={"PATH": "/bin"}
    )
    assert told.stdout == environment["CUDA_MPS_PIPE_DIRECTORY"]


def test_a_machine_without_it_is_one_clear_line(mps):
    answer = mps("start")
    assert answer.returncode == 1
    assert "nvidia-cuda-mps-control is not there" in answer.stderr


def test_what_it_does_not_know_it_refuses(mps):
    answer = mps("restart")
    assert answer.returncode == 2
    assert "start|stop|status|env" in answer.stderr
