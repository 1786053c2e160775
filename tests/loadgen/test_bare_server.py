from typing import Any

import pytest

from loadgen.bare_server import EngineUnknown, describe_engine, flags_of

MODES: dict[str, Any] = {
    "data": [
        {"id": "fp16", "engine": "fp16", "state": "ready"},
        {"id": "prefix_caching", "engine": "fp16", "state": "ready"},
        {"id": "gptq", "engine": "gptq", "state": "starting"},
        {"id": "int8", "engine": "int8", "state": "ready"},
    ],
    "engines": [
        {
            "name": "fp16",
            "state": "ready",
            "engine_args": {"model": "/models/m", "dtype": "bfloat16", "enforce_eager": True, "served_model_name": "x"},
            "env": {"OMP_NUM_THREADS": 2},
        },
        {"name": "int8", "state": "ready"},
    ],
}


def test_flags_of_every_kind_of_value() -> None:
    assert flags_of(
        {
            "block_size": 32,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "seed": None,
            "speculative_config": {"method": "ngram"},
            "served_model_name": ["a", "b"],
            "disable_log_stats": False,
        }
    ) == [
        *("--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--speculative-config", '{"method": "ngram"}', "--served-model-name", "a", "b"),
    ]


def test_settings_and_environment_come_from_the_engine_of_the_mode() -> None:
    engine = describe_engine(MODES, "prefix_caching")
    command = engine.command(8123, "name")
    assert command[1:] == [
        *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "8123"),
        *("--served-model-name", "name", "--model", "/models/m", "--dtype", "bfloat16", "--enforce-eager"),
    ]
    assert engine.environment()["OMP_NUM_THREADS"] == "2"
    assert "PATH" in engine.environment()


@pytest.mark.parametrize(
    ("modes", "mode", "words"),
    [
        (MODES, "awq", "no mode 'awq'; it has: fp16, prefix_caching, gptq, int8"),
        (MODES, "gptq", "starting, not ready"),
        (MODES, "int8", "does not show the engine_args of engine 'int8'"),
        ({"data": None}, "fp16", "it has: none"),
    ],
)
def test_what_is_missing_is_named(modes: dict[str, Any], mode: str, words: str) -> None:
    with pytest.raises(EngineUnknown) as caught:
        describe_engine(modes, mode)
    assert words in str(caught.value)
