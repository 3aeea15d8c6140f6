"""Numbers of 4 bits inside numbers of 8: both levels, their bounds, and how near they come."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import BuildError, ConfigError
from ingot.kernels.rows.int8_rows import dequantize_rows, int8_product
from ingot.kernels.weight.int4_weight import Int4Weight, fits_int8
from ingot.quant.methods.gptq import HessianSum, gptq
from ingot.quant.methods.rounding import dequantize, quantize
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.two_level_scales import MOST, inner_scales, quantize_two_level, two_levels
from tests.quant.inputs import output_error

GROUPS = (128, 64)


def weights(kind: str, outputs: int = 40, width: int = 300) -> torch.Tensor:
    drawn = torch.randn(outputs, width, generator=torch.Generator().manual_seed(0))
    if kind == "one side":
        return drawn.abs()
    if kind == "loud columns":
        drawn[:, ::37] *= 40
    if kind == "rows of unlike size":
        drawn *= 10.0 ** (torch.arange(outputs) % 9 - 4)[:, None]
    if kind == "both ends":
        drawn = drawn.sign()
    return drawn


KINDS = ("normal", "one side", "loud columns", "rows of unlike size", "both ends")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_levels(kind: str, group: int) -> None:
    """Every number of every group is in int8, and no weight is farther from its number than what a range that
    is cut by three steps leaves out.
    """
    weight = weights(kind)
    found = quantize_two_level(weight, group)
    steps = inner_scales(found)
    assert found.zeros is not None
    assert found.units is not None
    assert fits_int8(steps, found.zeros)
    assert (int(steps.min()) >= 1, int(steps.max()) <= 16) == (True, True)
    torch.testing.assert_close(found.units, weight.abs().amax(1) / MOST)
    assert torch.equal(found.scales, steps * found.units)  # a scale is a whole number of units, to the bit
    inside = dequantize(found) / found.units[:, None]
    torch.testing.assert_close(inside, inside.round(), rtol=0, atol=1e-3)
    assert float(inside.min()) >= -128.001
    assert float(inside.max()) <= 127.001
    error = ((weight - dequantize(found)) / found.units[:, None]).abs()
    assert float(error.max()) <= 15 * 3 / 2 + 16  # units: half of what is cut off, and a step


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_as_near_as_one_level(group: int) -> None:
    """An integer step costs little beside a scale of its own for each group."""
    weight = weights("normal", 256, 2048)
    two = (dequantize(quantize_two_level(weight, group)) - weight).norm() / weight.norm()
    one = quantize(weight, 4, group, symmetric=False, scale_dtype=torch.float32)
    single = (dequantize(one) - weight).norm() / weight.norm()
    assert float(two) < 1.03 * float(single)


def test_rows_of_zeros_are_exact() -> None:
    weight = weights("normal")
    weight[3] = 0
    weight[5, :128] = 0
    found = dequantize(quantize_two_level(weight, 128))
    assert not found[3].any()
    assert not found[5, :128].any()


def test_packed_and_back() -> None:
    weight, scheme = weights("loud columns"), Int4InInt8(64)
    tensors = scheme.pack(weight, torch.ones(40))
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    empty = scheme.layout(40, 300, True, torch.float32)
    assert shapes == {name: (tuple(t.shape), t.dtype) for name, t in empty.items()}
    exact = dequantize(quantize_two_level(weight, 64))
    torch.testing.assert_close(scheme.dequantize(tensors, 300, torch.float32), exact, rtol=1e-6, atol=0)
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    near = x @ exact.T + 1
    assert float((scheme.apply(x, tensors) - near).norm() / near.norm()) < 0.03


def test_gptq_keeps_outputs_better() -> None:
    """And takes any of a group's numbers, all of which are in int8."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    mixing = torch.randn(256, 256, generator=generator) / 16
    seen = HessianSum(256)
    seen.add(torch.randn(2000, 256, generator=generator) @ mixing)
    hessian = seen.mean()
    levels = two_levels(weight, 128, hessian.diagonal())
    chosen = gptq(
        weight,
        hessian,
        4,
        128,
        symmetric=False,
        act_order=True,
        scale_dtype=torch.float32,
        grid=levels.grid(),
    ).quantized
    found = levels.quantized(chosen.values, 128)
    assert found.zeros is not None
    assert fits_int8(inner_scales(found), found.zeros)
    rounded = dequantize(quantize_two_level(weight, 128))
    better, worse = (output_error(weight - near, hessian) for near in (dequantize(found), rounded))
    assert better < 0.7 * worse
    tensors = Int4InInt8(128).accept(found)
    packed = Int4InInt8(128).dequantize(tensors, 256, torch.float32)
    torch.testing.assert_close(packed, dequantize(found), rtol=1e-6, atol=0)


def test_what_cannot_be_rounded() -> None:
    bad = weights("normal")
    bad[2, 5] = torch.inf
    with pytest.raises(BuildError, match="row 2, column 5"):
        quantize_two_level(bad, 128)
    with pytest.raises(ConfigError, match="floating-point matrices"):
        quantize_two_level(torch.ones(3), 128)
    with pytest.raises(BuildError, match="too small for a scale"):
        quantize_two_level(torch.full((2, 64), 1e-40), 64)


def test_a_step_reaches_both_ends_of_its_range() -> None:
    """Weights at the ends alone, of ranges that no whole number of steps divides: cut ends would cost all."""
    ends = torch.linspace(0.21, 1.0, 40)[:, None] * torch.tensor([-1.0, 1.0]).repeat(32)
    weight = torch.cat([ends, torch.ones(40, 64) * torch.tensor([-1.0, 1.0]).repeat(32)], 1)
    found = quantize_two_level(weight, 64)
    steps = found.scales.T.repeat_interleave(64, 1)
    assert float(((dequantize(found) - weight).abs() / steps).max()) <= 0.5 + 1e-3


def test_weights_take_half_a_byte() -> None:
    tensors = Int4InInt8(128).layout(512, 4096, False, torch.float16)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size == 512 * (4096 // 2 + 2 * 4096 // 128 + 4)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_products_read_the_weight_as_it_is_stored(rows: int) -> None:
    """With the same result as from int8."""
    scheme = Int4InInt8(group=64)
    tensors = scheme.pack(torch.randn(40, 192, generator=torch.Generator().manual_seed(1)), None)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(2))
    assert isinstance(scheme.int8_weight(tensors, 192, rows), Int4Weight)
    numbers = scheme.quantize_input(x, tensors)
    expected = int8_product(numbers, scheme.plain_weight(tensors, 192), x.dtype)
    assert torch.equal(scheme.apply(x, tensors), expected)
    wide = dequantize_rows(numbers).double() @ scheme.dequantize(tensors, 192, torch.float64).T
    torch.testing.assert_close(expected.double(), wide, rtol=1e-5, atol=1e-5)
