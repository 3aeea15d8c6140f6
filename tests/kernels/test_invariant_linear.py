"""The batch-invariant linear layer against float64, and every row against itself in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product.invariant_linear import (
    FLOAT_TILES,
    NAMES,
    TILE_LIST,
    default_tiles,
    invariant_linear,
)
from tests.kernels.interpreter import order_products
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

NARROW = {"BLOCK_N": 16, "BLOCK_T": 8, "BLOCK_K": 32}
SHAPES = [(1, 64, 80), (1, 5, 1), (3, 37, 200), (8, 16, 128), (9, 50, 33), (33, 20, 96), (70, 130, 64)]


def weights(rows: int, cols: int, dtype: torch.dtype, device: str, seed: int = 1) -> torch.Tensor:
    """Random weights whose products stay of order one."""
    return (normal(rows, cols, dtype=torch.float32, seed=seed) / cols**0.5).to(device=device, dtype=dtype)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("narrow", [False, True])
def test_against_float64(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, narrow: bool
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    w = weights(outputs, width, dtype, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3) if rows % 2 else None
    y = impl(invariant_linear)(x, w, bias, NARROW if narrow else None)
    expected = x.double() @ w.double().T + (0.0 if bias is None else bias.double())
    assert_near(y, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(
    impl: Implementation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles that each number of rows gets; the interpreter is given products of one order."""
    order_products(monkeypatch)
    x, w = normal(40, 96, dtype=dtype, device=impl.device), weights(50, 96, dtype, impl.device)
    op = impl(invariant_linear)
    many = op(x, w)
    for begin, end in ((0, 1), (39, 40), (3, 5), (7, 15), (20, 40), (11, 28)):
        assert torch.equal(op(x[begin:end], w), many[begin:end])
        if dtype != torch.float32:  # fp32 has one tile choice
            assert torch.equal(op(x[begin:end], w, None, NARROW), many[begin:end])
    assert torch.equal(op(x.flip(0), w).flip(0), many)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_rows_and_no_rows(impl: Implementation) -> None:
    op = impl(invariant_linear)
    x = normal(5, 100, dtype=torch.float16, device=impl.device)[:, :48]
    w = weights(9, 48, torch.float16, impl.device)
    assert_near(op(x, w), x.double() @ w.double().T)
    assert op(x[:0], w).shape == (0, 9)


def test_default_tiles_are_of_the_closed_list() -> None:
    for rows in (*range(1, 70), 128, 200, 256, 300, 4096):
        for outputs in (32, 4096, 8192, 12288, 65536, 151936):
            for width in (32, 4096):
                half, full = (default_tiles(rows, outputs, width, n, torch.device("cpu")) for n in (2, 4))
                assert tuple(half[name] for name in NAMES) in TILE_LIST
                assert tuple(full[name] for name in NAMES) == FLOAT_TILES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.int64)}, "x has the wrong dtype"),
        ({"x": torch.zeros(8)}, "x has the wrong shape"),
        ({"weight": torch.zeros(6, 9)}, "weight has the wrong shape"),
        ({"weight": torch.zeros(6, 8).half()}, "weight has the wrong dtype"),
        ({"weight": torch.zeros(8, 6).T}, "not contiguous"),
        ({"bias": torch.zeros(5)}, "bias has the wrong shape"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8), "bias": torch.zeros(6)}
    invariant_linear(**arguments)
    with pytest.raises(IngotError, match=message):
        invariant_linear(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 11008), (97, 32), (768, 256), (333, 500)])
def test_every_tile_choice_gives_the_same_bits(dtype: torch.dtype, outputs: int, width: int) -> None:
    """Columns of x of very different size, so that the order of a sum shows."""
    x = normal(300, width, dtype=dtype, device="cuda") * torch.logspace(-3, 3, width, device="cuda").to(dtype)
    w = weights(outputs, width, dtype, "cuda")
    bias = normal(outputs, dtype=dtype, device="cuda", seed=3)
    expected = None
    for tiles in TILE_LIST:
        choice = dict(zip(NAMES, tiles, strict=True))
        result = invariant_linear(x, w, bias, choice)
        expected = result if expected is None else expected
        assert expected.isfinite().all()
        assert torch.equal(result, expected), tiles
        assert torch.equal(invariant_linear(x[100:133], w, bias, choice), expected[100:133]), tiles


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "width"), [(4096, 4096), (12288, 4096), (22016, 4096), (97, 32), (768, 3072)]
)
def test_a_row_among_any_number(dtype: torch.dtype, outputs: int, width: int) -> None:
    x, w = normal(2100, width, dtype=dtype, device="cuda"), weights(outputs, width, dtype, "cuda")
    many = invariant_linear(x, w)
    for rows in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 256, 257, 1000, 2048):
        for begin in (0, 2100 - rows):
            assert torch.equal(invariant_linear(x[begin : begin + rows], w), many[begin : begin + rows]), rows
