"""The self-check on a scripted GPU and on a machine without one."""

import os
import subprocess
import sys

from app.energy import check

LONELY = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pydantic", "psutil", "ray", "torch", "numpy", "vllm", "starlette"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from app.energy import check
check._IDLE_S = 1.5
sys.exit(check.main(["--seconds", "0.5"]))
"""


def run(code, library_folder):
    env = {**os.environ, "LD_LIBRARY_PATH": str(library_folder), "NVML_STUB_DEVICE": "GPU-0"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_pynvml_alone_is_enough_to_run(stub_build):
    """Whatever the residual is on a busy machine: it measures and prints without the application's libraries."""
    done = run(LONELY, stub_build.parent)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for line in ("GPU-0 (Stub GPU)", "method      nvml_counter", "measured", "idle", "residual"):
        assert line in done.stdout


def test_without_any_meter_it_says_so(tmp_path):
    done = run(LONELY, tmp_path)
    assert done.returncode == 2
    assert "energy figures will be null" in done.stdout


def test_without_a_gpu_it_says_modelled(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "_IDLE_S", 1.5)
    monkeypatch.setattr(check, "open_gpus", lambda uuids: _raise(check.MeterUnavailable("no library")))
    monkeypatch.setattr(check, "RaplSampler", lambda: _raise(check.MeterUnavailable("no package")))
    check.main(["--seconds", "1"])
    printed = capsys.readouterr().out
    assert "method      modelled" in printed
    assert "passed over nvml: no library" in printed


def _raise(error):
    raise error
