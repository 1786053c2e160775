"""The modes that start only when named: each delta takes effect in an engine of its own, one after the other.

They run without the application, to save the memory of its engines; the arguments are those it would use.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.config import load_settings
from app.engines import store
from app.engines.environment import UNSET, engine_environment
from app.engines.starting import model_path, vllm_args

pytestmark = pytest.mark.engine
# Another checkpoint to make, a model to compile: minutes each.
long = pytest.mark.skipif("MODESWITCH_TEST_ALL_MODES" not in os.environ, reason="long; run by make test-modes")
# vLLM's CPU kernels read 8-bit keys and values with these instructions only.
avx512 = pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="the processor has no AVX-512")

START = textwrap.dedent("""
    import asyncio, json, sys
    from app.energy.activity import ActivityRecorder
    from app.engines.activity import Activity
    from app.engines.llm import LLM
    from app.wire import Call, Endpoint

    async def main(arguments):
        llm = await asyncio.to_thread(LLM.load, arguments, {})
        await llm.connect(Activity(ActivityRecorder("tried")))
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12,
                "temperature": 0, "model": arguments["served_model_name"][0]}
        reply = await llm.respond(Call("1", "1", Endpoint.CHAT, "tried", body))
        text = json.loads(reply.body)["choices"][0]["message"]["content"]
        print("RESULT" + json.dumps({"effective": await llm.effective(), "text": text}))
        llm.shutdown()

    if __name__ == "__main__":
        asyncio.run(main(json.loads(sys.argv[1])))
""")


def started(mode, tmp_path, **args):
    """What an engine for this one mode reports of itself, and its answer."""
    settings = load_settings({"preset": "cpu", "modes": ["fp16", mode], **args})
    spec = settings.engine_specs[-1]
    arguments = {"model": model_path(spec, settings), **vllm_args(spec, settings)}
    env = {key: value for key, value in os.environ.items() if key not in UNSET}
    script = tmp_path / "start.py"
    script.write_text(START)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        env=env | engine_environment(settings, spec.name),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result, done.stderr[-3000:]
    return json.loads(result[0].removeprefix("RESULT"))


def test_chunked_prefill_takes_small_chunks(tmp_path):
    result = started("chunked_prefill", tmp_path)
    assert result["effective"]["max_num_batched_tokens"] == 256
    assert result["effective"]["enable_chunked_prefill"] is True
    assert "Paris" in result["text"]


@avx512
def test_kv_cache_compression_keeps_8_bit_keys_and_values(tmp_path):
    result = started("kv_cache_compression", tmp_path)
    assert result["effective"]["cache_dtype"] == "fp8"
    assert result["effective"]["kv_cache_dtype"] in ("torch.uint8", "torch.float8_e4m3fn")


@long
def test_awq_runs_4_bit_weights(tmp_path):
    result = started("awq", tmp_path)
    assert any("WNA16" in name for name in result["effective"]["linear_methods"])


def test_a_draft_model_speculates(tmp_path):
    folder = store.resolve("embedded", "fp16", {}, load_settings({"preset": "cpu"}).home)
    # Both models' keys and values share the cache: the preset's is too small for two of full length.
    cache = {"kv_cache_memory_bytes": 2**29}
    result = started("speculative_draft", tmp_path, model={"draft": folder}, engine_defaults=cache)
    assert result["effective"]["speculation"] == {"method": "draft_model", "tokens": 5}
    assert "Paris" in result["text"]


@long
def test_the_compiled_mode_is_not_eager(tmp_path):
    result = started("cuda_graphs", tmp_path)
    assert result["effective"]["enforce_eager"] is False
    assert result["effective"]["compilation_mode"] not in ("0", "CompilationMode.NONE")
    # This model holds two beginnings for about equally likely, and compiled products round otherwise.
    assert any(word in result["text"] for word in ("Paris", "L'Étoile"))
