"""What the weight-only schemes store, mean and compute."""

from __future__ import annotations

import pytest
import torch

from ingot.config.quantization.quant_config import QuantConfig
from ingot.kernels.weight.stored_weight import dequantized, row_pieces
from ingot.quant.schemes.scheme_registry import make_scheme
from ingot.quant.schemes.weight_only import WeightOnly

FORMS = [(8, 0, True), (4, 0, True), (4, 0, False), (4, 32, True), (4, 64, False), (4, 128, False)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def some_weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
@pytest.mark.parametrize("columns", [32, 200])
def test_numbers_are_the_nearest(
    bits: int, group: int, symmetric: bool, columns: int, dtype: torch.dtype
) -> None:
    """No number of the same scale and zero stands for a value that is nearer to the weight."""
    scheme = WeightOnly(bits, group, symmetric)
    weight = some_weight(7, columns, dtype)
    tensors = scheme.pack(weight, None)
    assert tensors["scales"].dtype == dtype
    wide = scheme.dequantize(tensors, columns, torch.float64)
    middle = torch.full_like(tensors["scales"], 1 << (bits - 1))
    scales, zeros = (
        t.double().view(-1, 7).repeat_interleave(group or columns, 0)[:columns].T[..., None]
        for t in (tensors["scales"], tensors.get("zeros", middle))
    )
    numbers = torch.arange(symmetric and bits == 8, 1 << bits, dtype=torch.float64)  # 8 bits: -127 to 127
    nearest = ((numbers - zeros) * scales - weight.double()[..., None]).abs().amin(-1)
    torch.testing.assert_close((wide - weight.double()).abs(), nearest, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_layout_is_what_is_packed(bits: int, group: int, symmetric: bool) -> None:
    scheme = WeightOnly(bits, group, symmetric)
    weight, bias = some_weight(5, 200, torch.float16), torch.zeros(5, dtype=torch.float16)
    packed, layout = scheme.pack(weight, bias), scheme.layout(5, 200, True, torch.float16)
    assert {n: (t.shape, t.dtype) for n, t in packed.items()} == {
        n: (t.shape, t.dtype) for n, t in layout.items()
    }
    assert list(packed) == list(layout)
    assert ("zeros" in packed) == (not symmetric)


def test_zero_and_constant_rows_survive() -> None:
    weight = torch.zeros(3, 64, dtype=torch.float16)
    weight[1] = 2.0
    weight[2] = -0.5
    for symmetric in (True, False):
        scheme = WeightOnly(4, 32, symmetric)
        wide = scheme.dequantize(scheme.pack(weight, None), 64, torch.float32)
        torch.testing.assert_close(wide, weight.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_product_is_that_of_the_dequantized_weight(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_scheme(QuantConfig(scheme, 32 if scheme == "w4a16" else 0))
    weight, bias = some_weight(19, 72, torch.float32), torch.randn(19)
    tensors = made.pack(weight, bias)
    x = torch.randn(2, 3, 72)
    expected = torch.nn.functional.linear(x, made.dequantize(tensors, 72, torch.float32), bias)
    torch.testing.assert_close(made.apply(x, tensors), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("ingot.quant.schemes.weight_only.PIECE", 5 * 72)
    torch.testing.assert_close(made.apply(x, tensors), expected, rtol=1e-5, atol=1e-5)
    invariant = made.batch_invariant()
    together = invariant.apply(x[0], tensors)
    torch.testing.assert_close(together, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([invariant.apply(x[0, i : i + 1], tensors) for i in range(3)]), together)
    assert invariant.batch_invariant() is invariant


def test_row_pieces_are_the_weight() -> None:
    for scheme in (WeightOnly(4, 32, False), WeightOnly(8)):
        weight = scheme.stored(scheme.pack(some_weight(7, 64, torch.float16), None), 64)
        for most in (1, 130, 10_000):
            pieces = [dequantized(piece, torch.float32) for piece in row_pieces(weight, most)]
            assert torch.equal(torch.cat(pieces), dequantized(weight, torch.float32))
