"""The products for AVX2 equal those with weights and inputs written out in full."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig  # noqa: E402
from vllm.model_executor.kernels.linear.scaled_mm import Int8ScaledMMLinearLayerConfig  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    pack_quantized_values_into_int32,
)
from vllm.scalar_type import scalar_types  # noqa: E402

from app.engines.cpu_kernels import Int4PackLinearKernel, Int8LinearKernel, PackedLinear, int8_product  # noqa: E402


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
def test_the_4_bit_product_is_right(group, rows, with_bias):
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


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (70,), (2, 9)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_bf16_product_is_right(shape, with_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 576).bfloat16(), torch.randn(192, 576).bfloat16()
    bias = torch.randn(192).bfloat16() if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = PackedLinear(weight)(x, weight, bias)
    assert (got.shape, got.dtype) == (expected.shape, torch.bfloat16)
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize("rows", [1, 31, 32, 70])
def test_the_8_bit_product_is_of_whole_numbers(rows):
    torch.manual_seed(0)
    x, weight = (torch.randint(-127, 128, (n, 1536), dtype=torch.int8) for n in (rows, 64))
    expected = x.long() @ weight.long().t()
    got = int8_product(x, weight)
    assert (got.shape, got.dtype) == (expected.shape, torch.float32)
    torch.testing.assert_close(got, expected.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_8_bit_layer_is_right(rows, channelwise, with_bias):
    torch.manual_seed(0)
    widths = [64, 128]
    weight = torch.randint(-127, 128, (192, 576), dtype=torch.int8)
    scales = torch.rand(192 if channelwise else 2, 1) * 0.02 + 0.001
    layer = torch.nn.Module()
    layer.logical_widths = widths
    layer.w = torch.nn.Parameter(weight, requires_grad=False)
    layer.s = torch.nn.Parameter(scales, requires_grad=False)
    layer.i_s = layer.i_zp = layer.azp = None
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=False, is_channelwise=channelwise, input_symmetric=True
    )
    kernel = Int8LinearKernel(config, ["w", "s", "i_s", "i_zp", "azp"])
    kernel.process_weights_after_loading(layer)
    x = torch.randn(rows, 576).bfloat16()
    bias = torch.randn(192).bfloat16() if with_bias else None
    by_output = scales if channelwise else scales.repeat_interleave(torch.tensor(widths), dim=0)
    expected = x.float() @ (weight.float() * by_output).t() + (0 if bias is None else bias.float())
    got = kernel.apply_weights(layer, x, bias)
    assert (got.shape, got.dtype) == (expected.shape, torch.bfloat16)
    # Each input is within half a step of 127 to its row's largest.
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.05 * expected.std().item())


def test_compiling_does_not_fix_the_branch_for_one_length():
    weight = torch.randn(192, 576).bfloat16()
    product = PackedLinear(weight)
    compiled = torch.compile(lambda x: product(x, weight), backend="eager", dynamic=True, fullgraph=True)
    for rows in (1, 2, 4, 40):
        x = torch.randn(rows, 576).bfloat16()
        torch.testing.assert_close(compiled(x), product(x, weight))
