"""Mixed into vLLM's worker (`worker_extension_cls`), to read from inside what an engine really uses."""

from __future__ import annotations

from typing import Any


class WorkerReport:
    """Methods that `AsyncLLM.collective_rpc` reaches by name; `self` is the worker."""

    def modeswitch_report(self) -> dict[str, Any]:
        """Kernels of the linear layers, KV-cache dtype, and the device allocator's peak in bytes (None on a CPU)."""
        import torch

        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        methods = {
            type(getattr(module.quant_method, "kernel", None) or getattr(module, "scheme", None) or module.quant_method)
            for module in model.modules()
            if getattr(module, "quant_method", None) is not None and hasattr(module, "weight_loader")
        }
        schemes = {type(scheme) for m in model.modules() if (scheme := getattr(m, "scheme", None)) is not None}
        caches = getattr(self.model_runner, "kv_caches", [])  # type: ignore[attr-defined]
        return {
            "linear_methods": sorted(method.__name__ for method in methods | schemes),
            "kv_cache_dtype": str(caches[0].dtype) if len(caches) else None,
            "allocator_peak_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
        }
