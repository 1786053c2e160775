"""4-bit weights on x86 CPUs without AVX-512, as a vLLM plugin (entry point `vllm.general_plugins`).

vLLM's own CPU kernel for 4-bit weights (`CPUWNA16LinearKernel`) is only in its AVX-512 build; on other CPUs an engine
with GPTQ or AWQ weights would start to load and then fail. PyTorch's int4 matrix product runs on AVX2 as well.
"""

from __future__ import annotations

import os

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

_GROUP_SIZES = (32, 64, 128, 256)
_INNER_K_TILES = 2
"""Required by PyTorch's signature; its CPU packing has one layout and ignores the value."""


def register() -> None:
    """Called by vLLM in each of its processes; without effect where vLLM's own kernel runs."""
    if not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, [disabled, "CPUWNA16LinearKernel"]))
    register_linear_kernel(Int4PackLinearKernel, PlatformEnum.CPU, "mp")


class Int4PackLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """`y = x W` with symmetric 4-bit `W`, through `torch.ops.aten._weight_int4pack_mm_for_cpu`.

    Weights `[out, in]` in groups along `in`; PyTorch computes `(q - 8) * scale + zero` for each, with `q` in 0..15,
    which is vLLM's `uint4b8` when `zero` is 0.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        inputs, outputs = c.partition_weight_shape
        group = inputs if c.group_size == -1 else c.group_size
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, "only symmetric 4-bit weights"
        if group not in _GROUP_SIZES or inputs % group:
            return False, f"the group size must be one of {_GROUP_SIZES} and divide the input size"
        if outputs % 16:
            return False, "the output size must be a multiple of 16"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack the checkpoint's layout, `[out, in / 8]` int32 and scales `[out, groups]`, for PyTorch."""
        packed, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        rows = packed.data if packed.input_dim == 1 else packed.data.t().contiguous()
        by_group = scales.data.t() if scales.output_dim == 0 else scales.data
        values = unpack_quantized_values_into_int32(rows, self.config.weight_type, 1)
        packed.data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.contiguous(), _INNER_K_TILES)
        scales.data = torch.stack([by_group, torch.zeros_like(by_group)], dim=-1).contiguous()
        layer.int4_group_size = self.config.partition_weight_shape[0] // by_group.shape[0]

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weights, scales, _ = self._get_weight_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), weights, layer.int4_group_size, scales.to(x.dtype)
        )
        product = product.reshape(*x.shape[:-1], product.shape[-1])
        return product if bias is None else product + bias
