"""The 4-bit product equals the one with weights written out in full."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    pack_quantized_values_into_int32,
)
from vllm.scalar_type import scalar_types  # noqa: E402

from app.engines.int4_kernel import Int4PackLinearKernel  # noqa: E402


def config(inputs=576, outputs=192, group=64, weight_type=scalar_types.uint4b8, zero_points=False):
    shape = (inputs, outputs)
    return MPLinearLayerConfig(shape, shape, weight_type, torch.bfloat16, group, zero_points)


def layer_with(values, scales):
    """A layer as compressed-tensors loads it: weights [out, in / 8] and scales [out, groups]."""
    layer = torch.nn.Module()
    packed = torch.nn.Parameter(pack_quantized_values_into_int32(values, scalar_types.uint4b8, 1), requires_grad=False)
    packed.input_dim, packed.output_dim, packed.packed_dim = 1, 0, 1
    scale = torch.nn.Parameter(scales, requires_grad=False)
    scale.input_dim, scale.output_dim = 1, 0
    layer.w, layer.s = packed, scale
    return layer


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_right(group, rows, with_bias):
    torch.manual_seed(0)
    c = config(group=group)
    inputs, outputs = c.partition_weight_shape
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    scales = (torch.rand(outputs, inputs // group) * 0.02 + 0.001).bfloat16()
    bias = torch.randn(outputs).bfloat16() if with_bias else None
    full = (values.float() - 8) * scales.float().repeat_interleave(group, dim=1)
    x = torch.randn(rows, inputs).bfloat16()
    layer = layer_with(values, scales)
    kernel = Int4PackLinearKernel(c, "w", "s")
    kernel.process_weights_after_loading(layer)
    expected = x.float() @ full.t() + (0 if bias is None else bias.float())
    got = kernel.apply_weights(layer, x, bias).float()
    assert got.shape == expected.shape
    # bfloat16 keeps 8 bits: a sum of 576 products of that precision.
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05 * expected.std().item())


@pytest.mark.parametrize(
    "c",
    [
        config(weight_type=scalar_types.uint4),
        config(zero_points=True),
        config(group=48),
        config(outputs=200),
    ],
)
def test_what_it_cannot_do_it_says(c):
    able, why = Int4PackLinearKernel.can_implement(c)
    assert not able
    assert why
