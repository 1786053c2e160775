"""Starting one engine: its arguments, its log file, and the root cause when it fails.

vLLM reports a failed start as "see root cause above": the cause is in the output of its processes. So that output
goes to a file of the engine's own, and the cause is read from there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.config import Settings
from app.engines import store
from app.modes import REFERENCE, EngineSpec

_CAUSE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: .+)?)$")
_NOT_THE_CAUSE = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization failed")


def vllm_args(spec: EngineSpec, settings: Settings) -> dict[str, Any]:
    """vLLM's `AsyncEngineArgs` for an engine, before the weights are looked up; plain JSON values.

    Precedence, low to high: the reference, memory and lengths, `engine_defaults`, what makes the modes what they are,
    `engines.<name>`.
    """
    engine = settings.engine_settings(spec.name)
    args: dict[str, Any] = {
        **REFERENCE[settings.platform],
        "served_model_name": [settings.model.served_name],
        "max_model_len": settings.model.max_model_len,
        "worker_extension_cls": "app.engines.worker_report.WorkerReport",
        "enable_log_requests": False,
        # vLLM allows 20, which of a small model's probability hold too little to compare modes by. An engine's limit
        # on what may be asked for, and no part of a mode.
        "max_logprobs": 100,
        # Equal priorities are first come, first served; a tenant that used more than its share waits for the others.
        "scheduling_policy": "priority",
    }
    if engine.kv_cache_memory_bytes is not None:
        args["kv_cache_memory_bytes"] = engine.kv_cache_memory_bytes
    if engine.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
    args |= settings.engine_defaults.engine_args
    args |= spec.exact_delta(settings.model.draft) | {"enable_prefix_caching": spec.prefix_caching}
    args |= settings.engines.get(spec.name, {}).get("engine_args", {})
    return {key: value for key, value in args.items() if value is not None}


def model_path(spec: EngineSpec, settings: Settings) -> str:
    """The weights to load, a folder or a Hugging Face name.

    Raises:
        CheckpointMissing, CheckpointCorrupt: see `app.engines.store`.
    """
    return store.resolve(settings.model.reference, spec.weights, settings.model.checkpoints, settings.home)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send this process's output to a file meanwhile; processes started inside keep writing there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for fd, _ in saved:
            os.dup2(log, fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(log)


def root_cause(error: BaseException, log: Path, since_byte: int) -> str:
    """One line that says why a start failed: the first error in the engine's log, else the exception itself."""
    try:
        with log.open("rb") as file:
            file.seek(since_byte)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        found = _CAUSE.search(line)
        if found and not any(text in line for text in _NOT_THE_CAUSE):
            return f"{found.group(1)} (log: {log})"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'} (log: {log})"
