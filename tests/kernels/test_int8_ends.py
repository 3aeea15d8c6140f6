"""Kernels that end in 8 bits give the numbers of their 16-bit forms, quantized: every bit of every number."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import Gate, silu_mul, silu_mul_triton
from ingot.kernels.activation.silu_mul_int8 import (
    quantized,
    quantized_triton,
    silu_mul_int8,
    silu_mul_int8_triton,
)
from ingot.kernels.norm.rms_norm import rms_norm, rms_norm_triton
from ingot.kernels.norm.sum_norm import sum_norm, sum_norm_triton
from ingot.kernels.product.int8_linear import int8_linear_parts, int8_linear_parts_triton
from ingot.kernels.rows.endings import InInt8
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, int8_product, quantize_rows
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

EPS = 1e-6
SHAPES = [(1, 1), (3, 7), (5, 96), (2, 1000), (1, 4096)]


def static_scale(yes: bool, device: str) -> torch.Tensor | None:
    """One that cuts: normal numbers go to four and more."""
    return torch.tensor([2.0 / 127], device=device) if yes else None


def assert_rows(actual: Int8Rows, expected: Int8Rows) -> None:
    """The same numbers and scales."""
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.scales, expected.scales)
    assert actual.group == expected.group


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("static", [False, True])
def test_quantized(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], static: bool) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device) * 3
    scale = static_scale(static, impl.device)
    rows = impl(quantized, quantized_triton)(x, static=scale)
    assert_rows(rows, quantize_rows(x, static=scale))
    assert not static or shape[1] < 96 or int(rows.values.abs().max()) == 127


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_rms_norm(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], with_residual: bool, static: bool
) -> None:
    x = normal(shape[0], shape[1] + 3, dtype=dtype, device=impl.device)[:, : shape[1]]
    weight = normal(shape[1], dtype=dtype, device=impl.device, seed=1)
    residual = normal(*shape, dtype=dtype, device=impl.device, seed=2) if with_residual else None
    scale = static_scale(static, impl.device)
    norm = impl(rms_norm, rms_norm_triton)
    rows, s = norm(x, weight, EPS, residual, ending=InInt8(scale))
    y, expected_s = norm(x, weight, EPS, residual)
    assert_rows(rows, quantize_rows(y, static=scale))
    assert torch.equal(s, expected_s)
    assert (s is x) == (residual is None)


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sums", ["fp32", "rows", "static"])
def test_sum_norm(impl: Implementation, dtype: torch.dtype, biased: bool, static: bool, sums: str) -> None:
    """From any parts to 16 and to 8 bits."""
    rows, hidden = 3, 130
    residual = normal(rows, hidden + 3, dtype=dtype, device=impl.device, seed=1)[:, :hidden]
    weight = normal(hidden, dtype=dtype, device=impl.device, seed=2)
    bias = normal(hidden, dtype=dtype, device=impl.device, seed=3) if biased else None
    x, w = int8_rows(rows, 300, impl.device, static=sums == "static"), int8_weight(hidden, 300, impl.device)
    tiles = {"BLOCK_N": 16, "BLOCK_K": 32, "SPLITS": 3, "num_stages": 2}
    parts: Int8Sums | torch.Tensor = impl(int8_linear_parts, int8_linear_parts_triton)(x, w, tiles)
    assert isinstance(parts, Int8Sums)
    expected = parts.product().double() + residual.double() + (0 if bias is None else bias.double())
    if sums == "fp32":
        parts = normal(4, rows, hidden, dtype=torch.float32, device=impl.device, seed=4)
        expected = expected - int8_product(x, w, torch.float32).double() + parts.double().sum(0)
    norm = impl(sum_norm, sum_norm_triton)
    y, total = norm(parts, residual, weight, EPS, bias)
    assert_near(total, expected)
    scale = static_scale(static, impl.device)
    found, stream = norm(parts, residual, weight, EPS, bias, ending=InInt8(scale))
    assert_rows(found, quantize_rows(y, static=scale))
    assert torch.equal(stream, total)
    normed, _ = rms_norm(total, weight, EPS)
    assert_near(y, normed.double())


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 11008)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_silu_mul(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], static: bool, activation: Gate
) -> None:
    gate_up = 2 * normal(shape[0], 2 * shape[1], dtype=dtype, device=impl.device)
    scale = static_scale(static, impl.device)
    rows = impl(silu_mul_int8, silu_mul_int8_triton)(gate_up, scale, activation=activation)
    wide = impl(silu_mul, silu_mul_triton)(gate_up, activation=activation)
    assert_rows(rows, quantize_rows(wide, static=scale))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "group"), [((3, 96), 32), ((2, 240), 80), ((5, 8), 8)])
def test_groups(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], group: int) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device)
    x[:, :group] *= 50
    assert_rows(impl(quantized, quantized_triton)(x, group), quantize_rows(x, group))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ties_go_to_the_even_number(impl: Implementation) -> None:
    halves = torch.arange(-127, 128, device=impl.device) / 2 + 0.0
    x = torch.cat([halves, torch.tensor([63.5 * 2], device=impl.device)])[None]  # the scale is 1
    rows = impl(quantized, quantized_triton)(x, static=torch.tensor([1.0], device=impl.device))
    assert torch.equal(rows.values.float(), x.round().float())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: Implementation) -> None:
    x = torch.zeros(0, 8, device=impl.device)
    assert impl(quantized, quantized_triton)(x).values.shape == (0, 8)
    assert impl(silu_mul_int8, silu_mul_int8_triton)(x).scales.shape == (0,)


def test_refused() -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(IngotError, match="static has the wrong shape"):
        rms_norm(x, weight, EPS, ending=InInt8(torch.ones(2)))
    with pytest.raises(IngotError, match="static has the wrong dtype"):
        quantized(x, static=torch.ones(1).half())
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        rms_norm(x, weight[:3], EPS, ending=InInt8())
    with pytest.raises(IngotError, match="two halves"):
        silu_mul_int8(torch.zeros(2, 5))
    with pytest.raises(IngotError, match="groups must divide"):
        quantized(x, 3)
    with pytest.raises(IngotError, match="the width"):
        quantized(torch.zeros(1, 65537))
