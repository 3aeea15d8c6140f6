"""Activations in 8 bits: the rule of rounding, and the exact product."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels.rows.int8_round import scale_of
from ingot.kernels.rows.int8_rows import (
    MOST,
    Int8Weight,
    dequantize_rows,
    int8_product,
    int8_sums,
    quantize_rows,
)
from ingot.quant.methods.smoothquant import fake_per_tensor
from ingot.quant.plain_rows import rounded_rows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_every_row_uses_all_numbers_and_errs_by_half_a_step() -> None:
    x = torch.randn(5, 96, dtype=torch.float16) * torch.tensor([1e-3, 1, 30, 1e-7, 5])[:, None].half()
    rows = quantize_rows(x)
    assert rows.values.abs().amax(dim=1).tolist() == [127] * 5
    error = (dequantize_rows(rows) - x.float()).abs()
    assert (error <= rows.scales[:, None] * 0.5001).all()


def test_groups_have_scales_of_their_own() -> None:
    x = torch.randn(3, 64)
    x[:, :32] *= 100
    rows = quantize_rows(x, group=32)
    assert rows.scales.shape == (3, 2)
    both = torch.stack([quantize_rows(x[:, :32]).scales, quantize_rows(x[:, 32:]).scales], dim=1)
    torch.testing.assert_close(rows.scales, both, rtol=0, atol=0)
    torch.testing.assert_close(dequantize_rows(rows), x, rtol=0, atol=float(rows.scales[:, 0].max()) * 0.51)


def test_a_static_scale_cuts_what_lies_beyond() -> None:
    rows = quantize_rows(torch.tensor([[0.5, -1.0, 300.0, -300.0]]), static=torch.tensor([1.0]))
    assert rows.values.tolist() == [[0, -1, 127, -128]]


def test_zeros_stay_zeros() -> None:
    rows = quantize_rows(torch.zeros(2, 8))
    assert not rows.values.any()
    assert torch.isfinite(rows.scales).all()


def test_sums_are_exact_where_fp32_would_not_be() -> None:
    x = torch.full((1, 11008), 127, dtype=torch.int8)
    x[0, 0] = 1
    weight = torch.full((2, 11008), 127, dtype=torch.int8)
    assert int8_sums(x, weight).tolist() == [[127 * 127 * 11007 + 127] * 2]


@pytest.mark.parametrize("group", [0, 32])
def test_the_product_is_that_of_what_the_numbers_mean(group: int) -> None:
    x, weight = (
        torch.randn(4, 64),
        Int8Weight(torch.randint(-127, 128, (6, 64), dtype=torch.int8), torch.rand(6)),
    )
    rows, bias = quantize_rows(x, group), torch.randn(6)
    wide = (
        dequantize_rows(rows).double() @ (weight.values.double() * weight.scales.double()[:, None]).T + bias
    )
    torch.testing.assert_close(
        int8_product(rows, weight, torch.float32, bias), wide.float(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_and_its_bias_are_rounded_once(dtype: torch.dtype) -> None:
    x = quantize_rows(torch.randn(8, 32))
    weight = Int8Weight(torch.randint(-127, 128, (16, 32), dtype=torch.int8), torch.rand(16))
    bias = torch.randn(16) * 50
    wide = int8_product(x, weight, torch.float32, bias)
    assert torch.equal(int8_product(x, weight, dtype, bias), wide.to(dtype))


@triton.jit
def scales_kernel(most_ptr, scale_ptr, inverse_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, inverse = scale_of(tl.load(most_ptr + places), tl.int8)
    tl.store(scale_ptr + places, scale)
    tl.store(inverse_ptr + places, inverse)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
def test_a_kernel_s_scales_are_the_rule_s_to_the_bit() -> None:
    """A last bit of the inverse moves numbers that lie between two."""
    most = torch.rand(4096) * 3 + 1e-3
    scales, inverses = torch.empty_like(most), torch.empty_like(most)
    scales_kernel[(4,)](most, scales, inverses, BLOCK=1024)
    assert torch.equal(scales, most / torch.full_like(most, 127))
    assert torch.equal(inverses, MOST / most)
    assert not torch.equal(inverses, torch.full_like(most, 127) / most)


def test_every_rule_cuts_at_the_same_values() -> None:
    """The kernels' rule, the proof's own, and the one that calibration rounds by."""
    x = torch.linspace(-300, 300, 1001)[None] * 0.25
    scale = torch.tensor([0.25])
    rows = quantize_rows(x, static=scale)
    assert (int(rows.values.min()), int(rows.values.max())) == (-128, 127)
    expected = dequantize_rows(rows)
    assert torch.equal(rounded_rows(x, scale=scale), expected)
    assert torch.equal(fake_per_tensor(x, 0.25 * 127), expected)
    flipped = rounded_rows(x, scale=scale, flips=True)
    assert float(flipped.min()) >= -128 * 0.25
