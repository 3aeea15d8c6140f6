"""Kernels that end in 8 bits give the numbers of their 16-bit forms, quantized: every bit of every number."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import Gate, silu_mul
from ingot.kernels.activation.plain_activation import plain_activation
from ingot.kernels.activation.silu_mul_int8 import Plain, quantized, silu_mul_int8
from ingot.kernels.rows.int8_rows import quantize_rows
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal
from tests.kernels.test_block_rows import assert_rows

SHAPES = [(1, 1), (3, 7), (5, 96), (2, 1000), (1, 4096)]


def static_scale(yes: bool, device: str) -> torch.Tensor | None:
    """One that cuts: normal numbers go to four and more."""
    return torch.tensor([2.0 / 127], device=device) if yes else None


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("static", [False, True])
def test_quantized(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], static: bool) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device) * 3
    scale = static_scale(static, impl.device)
    rows = impl(quantized)(x, static=scale)
    assert_rows(rows, quantize_rows(x, static=scale))
    assert not static or shape[1] < 96 or int(rows.values.abs().max()) == 127


@pytest.mark.grid(1)
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
    rows = impl(silu_mul_int8)(gate_up, scale, activation=activation)
    wide = impl(silu_mul)(gate_up, activation=activation)
    assert_rows(rows, quantize_rows(wide, static=scale))


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5120)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_plain_activations(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], static: bool, activation: Plain
) -> None:
    """A value that the exact activation leaves between two numbers may become either."""
    x = 3 * normal(*shape, dtype=dtype, device=impl.device)
    scale = static_scale(static, impl.device)
    rows = impl(quantized)(x, static=scale, activation=activation)
    expected = quantize_rows(plain_activation(x.double(), activation).to(dtype), static=scale)
    off = (rows.values.int() - expected.values.int()).abs()
    assert int(off.max()) <= 1
    assert float(off.float().mean()) < 1e-2
    torch.testing.assert_close(rows.scales, expected.scales, rtol=2**-7, atol=0)
    own = quantize_rows(plain_activation(x, activation), static=scale)
    assert impl.interpreted or impl.device != "cpu" or torch.equal(rows.values, own.values)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "group"), [((3, 96), 32), ((2, 240), 80), ((5, 8), 8), ((2, 1280), 64)])
def test_groups(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], group: int) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device)
    x[:, :group] *= 50
    assert_rows(impl(quantized)(x, group), quantize_rows(x, group))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ties_go_to_the_even_number(impl: Implementation) -> None:
    halves = torch.arange(-127, 128, device=impl.device) / 2 + 0.0
    x = torch.cat([halves, torch.tensor([63.5 * 2], device=impl.device)])[None]  # the scale is 1
    rows = impl(quantized)(x, static=torch.tensor([1.0], device=impl.device))
    assert torch.equal(rows.values.float(), x.round().float())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_lies_beyond_a_static_scale(impl: Implementation) -> None:
    """-128 is the last value on that side, as compressed-tensors cuts; a row's own scale never reaches it."""
    x = torch.tensor([[-127.4, -127.6, -128.4, -300.0, 127.4, 127.6, 300.0, 0.0]], device=impl.device)
    rows = impl(quantized)(x, static=torch.tensor([1.0], device=impl.device))
    assert rows.values.tolist() == [[-127, -128, -128, -128, 127, 127, 127, 0]]
    assert int(impl(quantized)(x).values.min()) == -127


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: Implementation) -> None:
    x = torch.zeros(0, 8, device=impl.device)
    assert impl(quantized)(x).values.shape == (0, 8)
    assert impl(silu_mul_int8)(x).scales.shape == (0,)


def test_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(IngotError, match="static has the wrong dtype"):
        quantized(x, static=torch.ones(1).half())
    with pytest.raises(IngotError, match="two halves"):
        silu_mul_int8(torch.zeros(2, 5))
    with pytest.raises(IngotError, match="groups must divide"):
        quantized(x, 3)
    with pytest.raises(IngotError, match="the width"):
        quantized(torch.zeros(1, 65537))
