"""Engine arguments, where output goes, and the root cause of a failed start."""

import os
import subprocess
import sys

import pytest

from app.config import load_settings
from app.engines.environment import engine_environment
from app.engines.starting import output_to, root_cause, vllm_args
from loadgen.fidelity import TOP_TOKENS

LOG = """\
(EngineCore pid=7) INFO 11-30 05:39:49 [core.py:1] starting
(EngineCore pid=7) ERROR 11-30 05:39:49 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 05:39:49 [core.py:9] ValueError: To serve at least one request, 3 GiB KV cache is needed
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def spec_of(settings, name):
    return next(spec for spec in settings.engine_specs if spec.name == name)


def test_the_root_cause_is_the_first_error_in_the_log(tmp_path):
    log = tmp_path / "int8.log"
    log.write_text("ValueError: of an earlier start\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write(LOG)
    cause = root_cause(RuntimeError("Engine core initialization failed."), log, since)
    assert cause == f"ValueError: To serve at least one request, 3 GiB KV cache is needed (log: {log})"


def test_without_a_log_the_exception_is_the_cause(tmp_path):
    cause = root_cause(OSError("no such model\nsecond line"), tmp_path / "none.log", 0)
    assert cause.startswith("OSError: no such model (log:")


def test_output_of_children_goes_to_the_file_and_comes_back(tmp_path, capfd):
    log = tmp_path / "logs" / "engine.log"
    with output_to(log):
        subprocess.run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"], check=True)
        os.write(1, b"own\n")
    print("after")
    assert sorted(log.read_text().split()) == ["err", "out", "own"]
    assert capfd.readouterr().out == "after\n"


@pytest.mark.parametrize("preset", ["cpu", "a100-40gb"])
def test_arguments_carry_the_mode_and_the_user_wins(preset):
    settings = load_settings(
        {
            "preset": preset,
            "modes": ["fp16", "prefix_caching", "gptq", "speculative"],
            "model": {"draft": "draft"},
            "engines": {"gptq": {"engine_args": {"max_num_batched_tokens": 77}}},
            "engine_defaults": {"num_gpus": 0.1},
        }
    )
    fp16, gptq = (vllm_args(spec_of(settings, name), settings) for name in ("fp16", "gptq"))
    assert (fp16["enable_prefix_caching"], gptq["enable_prefix_caching"]) == (True, False)
    assert gptq["max_num_batched_tokens"] == 77
    assert fp16["kv_cache_memory_bytes"] > 0
    speculation = vllm_args(spec_of(settings, "speculative"), settings)["speculative_config"]
    assert speculation["num_speculative_tokens"] == 5
    assert ("model" in speculation) == (preset != "cpu")


@pytest.mark.parametrize("preset", ["cpu", "a100-40gb"])
def test_vllm_knows_every_argument(preset):
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    fields = set(arg_utils.AsyncEngineArgs.__dataclass_fields__)
    settings = load_settings({"preset": preset})
    for spec in settings.engine_specs:
        assert set(vllm_args(spec, settings)) <= fields


@pytest.mark.parametrize("preset", ["cpu", "a100-40gb"])
def test_every_engine_gives_as_many_log_probabilities_as_the_gate_compares(preset):
    settings = load_settings({"preset": preset, "engine_defaults": {"engine_args": {"max_num_seqs": 3}}})
    for spec in settings.engine_specs:
        assert vllm_args(spec, settings)["max_logprobs"] == TOP_TOKENS
        assert "max_logprobs" not in spec.delta
    mine = load_settings({"preset": preset, "engine_defaults": {"engine_args": {"max_logprobs": 5}}})
    assert vllm_args(mine.engine_specs[0], mine)["max_logprobs"] == 5


def test_each_engine_has_its_own_compile_cache():
    settings = load_settings({"preset": "cpu"})
    caches = [engine_environment(settings, spec.name)["VLLM_CACHE_ROOT"] for spec in settings.engine_specs]
    assert len(set(caches)) == len(caches)


def test_an_engine_uses_the_cores_that_it_is_given():
    settings = load_settings({"preset": "cpu", "engines": {"gptq": {"cores": "0,2-3"}}})
    bound, free = engine_environment(settings, "gptq"), engine_environment(settings, "fp16")
    assert (bound["OMP_NUM_THREADS"], bound["KMP_AFFINITY"]) == ("3", "granularity=fine,explicit,proclist=[0,2,3]")
    assert free["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) - 1))
    assert "KMP_AFFINITY" not in free
    assert "OMP_NUM_THREADS" not in engine_environment(load_settings({"preset": "a100-40gb"}), "fp16")
