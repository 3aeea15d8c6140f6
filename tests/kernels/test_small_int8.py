"""Products of a few rows in 8 bits: the exact sums, bit for bit, and what they mean."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton
from ingot.kernels.product.int8.int8_linear import int8_linear_parts
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight, int8_product, int8_sums
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, launched, normal

NARROW = {"BLOCK_N": 16, "BLOCK_K": 32, "num_stages": 2}  # several tiles even of a small weight
SHAPES = [(1, 37, 200), (1, 5, 1), (2, 33, 70), (5, 16, 128), (16, 20, 96), (40, 70, 130), (64, 50, 172)]


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 256])
@pytest.mark.parametrize("programs", [0, 6])
def test_sums_are_exact(
    impl: Implementation, rows: int, outputs: int, width: int, prefetch: int, programs: int
) -> None:
    """Bit-equal to the reference, in any number of parts."""
    x, weight = int8_rows(rows, width, impl.device), int8_weight(outputs, width, impl.device)
    tiles = NARROW | {"SPLITS": 3, "PREFETCH": prefetch, "PROGRAMS": programs}
    sums = impl(int8_linear_parts)(x, weight, tiles)
    assert isinstance(sums, Int8Sums)
    assert sums.parts.dtype == torch.int32
    assert torch.equal(sums.parts.sum(0), int8_sums(x.values, weight.values).long())
    torch.testing.assert_close(sums.product(), int8_product(x, weight, torch.float32), rtol=0, atol=0)


def test_sums_are_exact_where_fp32_would_not_be() -> None:
    x = Int8Rows(torch.full((2, 11008), 127, dtype=torch.int8), torch.ones(2))
    x.values[0, 0] = 1
    weight = Int8Weight(torch.full((3, 11008), -127, dtype=torch.int8), torch.ones(3))
    sums = launched(int8_linear_parts)(x, weight)
    assert isinstance(sums, Int8Sums)
    assert torch.equal(sums.parts.sum(0), int8_sums(x.values, weight.values).long())


def small_linear(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, *sums: torch.Tensor | None
) -> torch.Tensor:
    """Narrow tiles of the kernel."""
    return small_int8_linear_triton(x, weight, dtype, *sums, tiles=NARROW)


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("scales", ["rows", "static"])
@pytest.mark.parametrize("sums", [False, True])
def test_linear(
    impl: Implementation,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    width: int,
    scales: str,
    sums: bool,
) -> None:
    x = int8_rows(rows, width, impl.device, static=scales == "static")
    weight = int8_weight(outputs, width, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3) if sums else None
    residual = normal(rows, outputs, dtype=dtype, device=impl.device, seed=4) if sums else None
    y = small_linear(x, weight, dtype, bias, residual)
    expected = int8_sums(x.values, weight.values).double() * x.scales.double()[:, None] * weight.scales
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    assert y.dtype == dtype
    assert_near(y, expected)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "outputs", "width", "group"),
    [(1, 20, 96, 32), (3, 33, 256, 64), (9, 16, 240, 80), (33, 7, 64, 8), (64, 20, 144, 48)],
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_groups_have_scales_of_their_own(
    impl: Implementation, rows: int, outputs: int, width: int, group: int, prefetch: int
) -> None:
    x, weight = int8_rows(rows, width, impl.device, group), int8_weight(outputs, width, impl.device)
    tiles = {"BLOCK_N": 16, "num_stages": 2, "SPLITS": 2, "PREFETCH": prefetch}
    parts = impl(int8_linear_parts)(x, weight, tiles)
    assert isinstance(parts, torch.Tensor)
    wide = x.values.double().unflatten(1, (-1, group)) * x.scales.double()[..., None]
    expected = wide.flatten(1) @ (weight.values.double() * weight.scales.double()[:, None]).T
    torch.testing.assert_close(parts.double().sum(0), expected, rtol=1e-5, atol=1e-5)
    if impl.interpreted or impl.device == "cuda":
        y = small_int8_linear_triton(x, weight, torch.float32)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("rows", [2, 9, 64])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_groups_whose_scales_all_rows_share(impl: Implementation, rows: int, prefetch: int) -> None:
    """The same bits whether a group's scale is read once or for each row; of one row, too."""
    x, weight = int8_rows(rows, 160, impl.device, 32), int8_weight(33, 160, impl.device)
    once = Int8Rows(x.values, x.scales[0].expand(rows, -1), 32)
    each = Int8Rows(x.values, once.scales.contiguous(), 32)
    one = Int8Rows(x.values[:1], each.scales[:1], 32)
    tiles = {"BLOCK_N": 16, "num_stages": 2, "SPLITS": 2, "PREFETCH": prefetch}
    found, expected, alone = (launched(int8_linear_parts)(side, weight, tiles) for side in (once, each, one))
    assert isinstance(found, torch.Tensor)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(found, expected)
    if impl.interpreted or rows <= 8:  # else tiles of other rows, which may sum in another order
        assert torch.equal(found[:, :1], alone)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_rows_and_no_rows(impl: Implementation) -> None:
    op = impl(int8_linear_parts)
    x, weight = int8_rows(4, 100, impl.device), int8_weight(9, 80, impl.device)
    part = Int8Rows(x.values[:, :60], x.scales)
    narrow = Int8Weight(weight.values[:, :60], weight.scales)
    assert torch.equal(op(part, narrow).parts.sum(0), int8_sums(part.values, narrow.values).long())
    assert op(Int8Rows(part.values[:0], x.scales[:0]), narrow).parts.shape[1:] == (0, 9)


def test_refused() -> None:
    x, weight = int8_rows(2, 8), int8_weight(6, 8)
    with pytest.raises(IngotError, match="number of rows"):
        int8_linear_parts(int8_rows(257, 8), weight)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        int8_linear_parts(x, int8_weight(6, 9))
    with pytest.raises(IngotError, match="x has the wrong dtype"):
        int8_linear_parts(Int8Rows(x.values.float(), x.scales), weight)
    with pytest.raises(IngotError, match="scales of x has the wrong shape"):
        int8_linear_parts(Int8Rows(x.values, torch.ones(3)), weight)
    with pytest.raises(IngotError, match="groups must divide"):
        int8_linear_parts(Int8Rows(x.values, torch.ones(2, 2), 3), weight)
    with pytest.raises(IngotError, match="the width"):
        int8_linear_parts(int8_rows(1, 133_001), weight)
