"""Products of a few rows in 8 bits and a weight of 4 inside 8, straight into registers: exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.kernels.product.few_rows.resolved_launch import PARTS, int8_launch
from ingot.kernels.product.few_rows.small_int8 import small_int8_linear_triton
from ingot.kernels.product.int8.int8_linear import int8_linear_parts
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, int8_product, int8_sums
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, expanded
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.two_level_scales import quantize_two_level
from tests.kernels.flat_calls import small_int8_qkv_reference, small_int8_qkv_triton
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, launched, normal

KERNELS = IMPLEMENTATIONS[1:]
TILES = {"BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 2, "PROGRAMS": 0, "FRAGMENTS": 2}
# Rows, outputs, columns: tiles that are not full, chunks that are not, fewer chunks than warps ask for.
SHAPES = [(1, 16, 128), (1, 37, 208), (8, 33, 320), (3, 64, 1024), (16, 50, 656)]
CHANGES = [{}, {"FRAGMENTS": 1, "num_warps": 4, "BLOCK_K": 256}, {"BLOCK_N": 32, "FRAGMENTS": 4}]


def four_bits(outputs: int, width: int, group: int, device: str) -> Int4Weight:
    generator = torch.Generator().manual_seed(width)
    found = quantize_two_level(torch.randn(outputs, width, generator=generator), group)
    tensors = Int4InInt8(group=group).accept(found)
    return Int4InInt8(group=group).int4_weight({n: t.to(device) for n, t in tensors.items()}, width)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("group", [128, 64])
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("changes", CHANGES)
def test_sums_are_exact(
    impl: Implementation,
    group: int,
    rows: int,
    outputs: int,
    width: int,
    splits: int,
    changes: dict[str, int],
) -> None:
    """Of pairs that become numbers in registers."""
    x, weight = int8_rows(rows, width, impl.device), four_bits(outputs, width, group, impl.device)
    tiles = TILES | {"SPLITS": splits} | changes
    assert int8_launch(PARTS, x, weight, tiles).loop.KIND == "int8_fragments"
    sums = launched(int8_linear_parts)(x, weight, tiles)
    assert isinstance(sums, Int8Sums)
    assert torch.equal(sums.parts.sum(0), int8_sums(x.values, expanded(weight).values).long())


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("static", [False, True])
def test_linear_is_that_of_whole_bytes(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, static: bool
) -> None:
    """To the bit, by the default tiles, too."""
    x = int8_rows(rows, width, impl.device, static=static)
    weight = four_bits(outputs, width, 128, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3)
    residual = normal(rows, outputs, dtype=dtype, device=impl.device, seed=4)
    first, *others = (
        small_int8_linear_triton(x, weight, dtype, bias, residual, None, tiles)
        for tiles in (TILES | {"FRAGMENTS": 0}, TILES | {"FRAGMENTS": 1}, None)
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.grid
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 24), (7, 40), (16, 16)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_groups(impl: Implementation, rows: int, outputs: int, splits: int, shared: bool, depth: int) -> None:
    """A chunk is a group of x; all rows may share its scales."""
    x, weight = int8_rows(rows, 640, impl.device, 128), four_bits(outputs, 640, 128, impl.device)
    x = Int8Rows(x.values, x.scales[:1].expand(rows, -1), 128) if shared else x
    parts = launched(int8_linear_parts)(x, weight, TILES | {"SPLITS": splits, "FRAGMENTS": depth})
    assert isinstance(parts, torch.Tensor)
    assert parts.shape == (splits, rows, outputs)
    expected = int8_product(x, expanded(weight), torch.float32)
    torch.testing.assert_close(parts.sum(0), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_qkv(
    impl: Implementation, dtype: torch.dtype, rows: int, rotary: bool, heads: tuple[int, int]
) -> None:
    head_dim, width, device = 32, 320, impl.device
    outputs = (heads[0] + 2 * heads[1]) * head_dim
    x, weight = int8_rows(rows, width, device), four_bits(outputs, width, 64, device)
    bias = normal(outputs, dtype=dtype, device=device, seed=3)
    table = normal(40, head_dim, dtype=torch.float32, device=device, seed=5) if rotary else None
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:rows].to(device)
    slots[0] = -1
    positions = torch.arange(rows, device=device)

    def run(op: Any, **tiles: dict[str, int]) -> list[torch.Tensor]:
        caches = [torch.zeros(3, heads[1], 8, head_dim, dtype=dtype, device=device) for _ in range(2)]
        place = (table, positions + 3, positions, slots, *caches)
        return [op(x, weight, bias, *place, *heads, head_dim, **tiles), *caches]

    found = run(small_int8_qkv_triton, tiles=TILES)
    same = run(small_int8_qkv_triton, tiles=TILES | {"FRAGMENTS": 0, "BLOCK_K": 64})
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
    for ours, theirs in zip(found, run(small_int8_qkv_reference), strict=True):
        assert_near(ours, theirs.double())


@pytest.mark.parametrize(
    "case", ["17 rows", "odd rows", "shares", "narrow chunks", "another group", "odd start", "whole bytes"]
)
def test_where_they_do_not_fit(case: str) -> None:
    rows, width = 17 if case == "17 rows" else 4, 200 if case == "odd rows" else 256
    x = int8_rows(rows, width, "cpu", 64 if case == "another group" else 0)
    weight: AnyInt8 = four_bits(32, width, 64, "cpu")
    if case == "whole bytes":
        weight = int8_weight(32, width, "cpu")
    if case == "odd start":
        values = torch.zeros(rows, width + 16, dtype=torch.int8)[:, 1 : width + 1]
        x = Int8Rows(values, x.scales)
    changes = {"shares": {"PROGRAMS": 2}, "narrow chunks": {"BLOCK_K": 64}}.get(case, {})
    assert int8_launch(PARTS, x, weight, TILES | changes).loop.KIND == "matrix"
    fits = int8_launch(PARTS, int8_rows(4, 256, "cpu"), four_bits(32, 256, 64, "cpu"), TILES)
    assert (fits.loop.KIND, fits.loop.FRAGMENTS) == ("int8_fragments", 2)
