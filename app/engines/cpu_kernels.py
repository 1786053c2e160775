"""Matrix products for x86 CPUs without AVX-512, as a vLLM plugin (entry point `vllm.general_plugins`).

vLLM's CPU kernels are made for AVX-512. Its AVX2 build has no product for 4-bit weights, so an engine with GPTQ or AWQ
weights would start to load and then fail. It has one for 8-bit weights that takes four times as long as this one for
a single row, and it leaves bfloat16 to PyTorch, which computes it without vectors for more than a row: eight rows take
three times as long as in float32. So here each product takes the way that is fast on AVX2.
"""

from __future__ import annotations

import os

import torch
import vllm.model_executor.layers.utils as vllm_layers
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types
from vllm.utils.torch_utils import direct_register_custom_op

_GROUP_SIZES = (32, 64, 128, 256)
_SHAPES_KEPT = 32
"""Numbers of rows for which oneDNN keeps what it prepared, as vLLM has it."""
_INNER_K_TILES = 2
"""Required by PyTorch's signature; its CPU packing has one layout and ignores the value."""
_FEW_ROWS_BF16 = 3
_FEW_ROWS_INT8 = 32
"""Below, reading the weights is what takes the time; from here on a float32 product is faster."""


def register() -> None:
    """Called by vLLM in each of its processes; without effect where vLLM's own kernels run."""
    if not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    replaced = ("CPUWNA16LinearKernel", "CPUInt8ScaledMMLinearKernel")
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, [disabled, *replaced]))
    register_linear_kernel(Int4PackLinearKernel, PlatformEnum.CPU, "mp")
    register_linear_kernel(Int8LinearKernel, PlatformEnum.CPU, "int8")
    _use_bf16_linear()


# bfloat16 -------------------------------------------------------------------------------------------------------------


def bf16_linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + b` for bfloat16 `x` `[..., in]` and `W` `[out, in]`, rounded once at the end.

    packed: the handle of oneDNN's product with the same weights in float32.
    """
    if x.numel() < _FEW_ROWS_BF16 * x.shape[-1]:
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).float()
    product = rows.new_empty((rows.shape[0], weight.shape[0]))
    torch.ops._C.onednn_mm(product, rows, None if bias is None else bias.float(), packed)
    return product.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _bf16_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class PackedLinear:
    """A layer's product with its weights kept a second time, as float32 in oneDNN's layout: 4 bytes a weight more.

    Converting them for each product would take longer than the product of a dozen rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        # The object owns what its tensor is a handle of.
        self._product = ops.create_onednn_mm(weight.float().t(), _SHAPES_KEPT)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.modeswitch.bf16_linear(x, weight, self._product.handler_tensor, bias)
        return product


def _use_bf16_linear() -> None:
    """Take `bf16_linear` where vLLM would fall back to PyTorch's product."""
    original = vllm_layers.dispatch_cpu_unquantized_gemm

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.dtype == torch.bfloat16 and layer.weight.ndim == 2 and not layer.weight.is_meta:
            layer.cpu_linear = PackedLinear(layer.weight)
        else:
            original(layer, remove_weight)

    vllm_layers.dispatch_cpu_unquantized_gemm = dispatch


# 8-bit weights and inputs ---------------------------------------------------------------------------------------------


class Int8LinearKernel(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 with symmetric inputs scaled per row as they come; others are left to vLLM's kernel.

    Inputs are quantised as vLLM does it. Their product with the weights is of whole numbers up to 127, which bfloat16
    and float32 hold exactly.
    """

    @property
    def _ours(self) -> bool:
        return self.config.input_symmetric and not self.config.is_static_input_scheme

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay `[out, in]` int8; scales become one per output, float32."""
        if not self._ours:
            super().process_weights_after_loading(layer)
            return
        _, scale_name, *_ = self.layer_param_names
        _, scale, *_ = self._get_layer_params(layer)
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        setattr(layer, scale_name, torch.nn.Parameter(scale.data.float().flatten(), requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._ours:
            return super().apply_weights(layer, x, bias)
        weights, weight_scales, *_ = self._get_layer_params(layer)
        rows, row_scales, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        product = torch.ops.modeswitch.int8_product(rows, weights) * row_scales * weight_scales
        if bias is not None:
            product = product + bias
        return product.to(x.dtype).reshape(*x.shape[:-1], weights.shape[0])


def int8_product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The product of int8 `rows` `[n, in]` and `weights` `[out, in]`, as float32 `[n, out]`.

    With few rows it is rounded to bfloat16 on the way, as the result of the layer is in the end.
    """
    if rows.shape[0] >= _FEW_ROWS_INT8:
        return torch.nn.functional.linear(rows.float(), weights.float())
    ones = torch.ones(weights.shape[0], dtype=torch.bfloat16)
    return torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), weights, ones).float()


def _int8_product_shape(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[0]), dtype=torch.float32)


# Operators of their own, so that a compiled engine does not fix a branch for the length it was traced with.
_OPERATORS = torch.library.Library("modeswitch", "DEF")
direct_register_custom_op("bf16_linear", bf16_linear, fake_impl=_bf16_linear_shape, target_lib=_OPERATORS)
direct_register_custom_op("int8_product", int8_product, fake_impl=_int8_product_shape, target_lib=_OPERATORS)


# 4-bit weights --------------------------------------------------------------------------------------------------------


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
