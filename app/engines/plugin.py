"""The entry point `vllm.general_plugins`: what vLLM is taught in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM. Imports here, because the entry point itself is looked up before vLLM is ready."""
    from app.engines import int4_kernel, waiting

    int4_kernel.register()
    waiting.register()
