"""Engine-core processes as copies of one that has vLLM imported already.

vLLM spawns the engine core as a fresh interpreter, which then imports for 15 s what the process that starts it has
just imported. Here both import at the same time, each on its core, and the engine core is forked from the second.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

_MODULES = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "app.engines.worker_report",
]
"""What an engine core on a CPU imports; anything else it imports itself."""


def begin() -> None:
    """Start the process to copy; it imports in the background. Copies get the environment of this moment."""
    forkserver.set_forkserver_preload(_MODULES)
    forkserver.ensure_running()


def use() -> None:
    """Make vLLM fork engine cores from it. Imports vLLM."""
    import vllm.v1.engine.utils

    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
