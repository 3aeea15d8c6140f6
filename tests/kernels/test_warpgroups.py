"""Products in 8 bits by groups of warps (Hopper): exact sums, and the ends of the kernel for other GPUs."""

from __future__ import annotations

import pytest
import torch

import ingot.kernels.product.int8.int8_linear as int8_linear_module
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_triton
from ingot.kernels.product.int8.warpgroup_matmul import (
    registers,
    takes_warpgroups,
    warpgroup_matmul_triton,
    warpgroup_parts_triton,
)
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight, int8_sums
from ingot.kernels.tiles.int8_tiles import Machine, machine_of
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.tiles.warpgroup_tiles import GROUP_ROWS, TILES, rated, warpgroup_bytes, warpgroup_tiles
from ingot.kernels.weight.int4_weight import AnyInt8, expanded
from tests.kernels.int4_case import int4_weight
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import assert_near, normal

HOPPER = Machine(132, True, True, 227 << 10)
ENDS = [(torch.float16, ()), (torch.bfloat16, ("bias", "residual")), (torch.float32, ("bias", "residual"))]
SHAPES = [(17, 4096, 4096), (65, 1032, 1040), (200, 2056, 512), (300, 4096, 11008), (700, 6144, 4096)]


def weight_of(outputs: int, width: int, four: bool) -> AnyInt8:
    if four:
        return int4_weight(outputs, width, 128, "cuda")[0]
    return int8_weight(outputs, width, "cuda")


def as_bytes(weight: AnyInt8) -> Int8Weight:
    """The weight as int8 in a tensor of whole rows, by PyTorch."""
    return weight if isinstance(weight, Int8Weight) else expanded(weight)


def choices(x: Int8Rows, four: bool, itemsize: int) -> list[dict[str, int]]:
    """Every choice of tiles that this machine may make for so many rows."""
    return [tiles for _, tiles in rated(len(x.values), itemsize, machine_of(x.values.device), x.group, four)]


@pytest.mark.grid
@pytest.mark.parametrize("rows", [17, 32, 64, 65, 128, 200, 256, 257, 2048])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 11008), (12288, 4096), (28672, 4096), (40, 128)])
@pytest.mark.parametrize(("four", "group"), [(False, 0), (False, 128), (True, 0), (True, 128)])
@pytest.mark.parametrize("split", [False, True])
def test_tiles_fit_a_multiprocessor(
    rows: int, shape: tuple[int, int], four: bool, group: int, split: bool
) -> None:
    itemsize, most = 4 if split else 2, GROUP_ROWS if four else MAX_ROWS
    rows = min(rows, most) if group else rows
    tiles = warpgroup_tiles(rows, *shape, itemsize, HOPPER, group, four, split)
    assert tiles.keys() == TILES
    assert tiles["num_stages"] >= 3
    assert (warpgroup_bytes(tiles, itemsize, four, group > 0 and not four) + 1024) * tiles[
        "PROGRAMS"
    ] <= HOPPER.shared + 1024
    assert tiles["SPLITS"] == 1 or split
    assert tiles["OVERLAP"] == (2 if rows <= 256 else 1)


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "four", "split", "expected"),
    [
        (128, 12288, 4096, False, False, (2, 128, 1)),
        (256, 22016, 4096, False, False, (3, 256, 1)),  # 115 tiles for 132 multiprocessors
        (256, 12288, 4096, False, False, (2, 256, 1)),
        (256, 6144, 4096, False, False, (1, 256, 1)),
        (256, 4096, 4096, False, True, (1, 256, 2)),
        (512, 4096, 11008, False, False, (1, 256, 1)),
        (2048, 22016, 4096, False, False, (3, 256, 1)),
        (2048, 4096, 11008, False, False, (2, 256, 1)),
        (8192, 12288, 4096, False, False, (2, 256, 1)),
        (32, 4096, 11008, True, True, (1, 32, 8)),
        (64, 4096, 11008, True, True, (1, 64, 4)),
        (128, 22016, 4096, True, False, (3, 128, 1)),
        (128, 12288, 4096, True, False, (1, 128, 1)),
    ],
)
def test_tiles_are_those_that_were_fastest(
    rows: int, outputs: int, width: int, four: bool, split: bool, expected: tuple[int, ...]
) -> None:
    """On an H100: docs/results/int8_warpgroups.json."""
    tiles = warpgroup_tiles(rows, outputs, width, 4 if split else 2, HOPPER, 0, four, split)
    assert (tiles["GROUPS"], tiles["BLOCK_T"], tiles["SPLITS"]) == expected


def test_shared_memory_is_what_the_compiler_takes() -> None:
    """By compiled kernels: operands of every stage, pieces, barriers; a weight of 4 bits takes half."""
    tiles = {"GROUPS": 2, "BLOCK_T": 256, "PIECE": 64, "num_stages": 4}
    assert 0 <= warpgroup_bytes(tiles, 2, False) - 229_656 <= 512
    assert 0 <= warpgroup_bytes(tiles, 2, True) - 196_920 <= 512
    assert 0 <= warpgroup_bytes(tiles, 4, False) - 196_792 <= 512


@pytest.mark.parametrize(("groups", "programs"), [(1, 1), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)])
def test_registers_fit_a_multiprocessor(groups: int, programs: int) -> None:
    """Those at the start, and those that the groups have while the warp that loads has few."""
    each, own = registers(groups, programs)
    threads = 128 * programs
    assert each % 8 == own % 8 == 0
    assert 65536 - 8 * threads * (groups + 1) < each * threads * (groups + 1) <= 65536 or each == 248
    assert threads * (own * groups + 24) <= each * threads * (groups + 1)


def test_which_operands_the_kernel_reads() -> None:
    x, weight = int8_rows(300, 256), int8_weight(40, 256)
    assert takes_warpgroups(x, weight)
    assert not takes_warpgroups(int8_rows(100, 256, group=128), weight)
    pairs = int4_weight(40, 256, 128)[0]
    assert takes_warpgroups(x, pairs)
    assert takes_warpgroups(int8_rows(128, 256, group=128), pairs)
    assert not takes_warpgroups(int8_rows(129, 256, group=128), pairs)
    assert not takes_warpgroups(int8_rows(100, 256, group=64), pairs)
    assert not takes_warpgroups(x, int4_weight(40, 256, 64)[0])
    assert not takes_warpgroups(int8_rows(300, 250), int8_weight(40, 250))
    e4m3 = x.values.to(torch.float8_e4m3fn), weight.values.to(torch.float8_e4m3fn)
    assert not takes_warpgroups(Int8Rows(e4m3[0], x.scales), Int8Weight(e4m3[1], weight.scales))
    shifted = torch.zeros(300, 272, dtype=torch.int8)[:, 8:264]
    assert not takes_warpgroups(Int8Rows(shifted, x.scales), weight)
    assert not takes_warpgroups(x, Int8Weight(torch.zeros(40, 264, dtype=torch.int8)[:, :256], weight.scales))


@pytest.mark.parametrize(
    ("rows", "four", "tiles", "expected"),
    [
        (64, False, None, False),
        (65, False, None, True),
        (65, False, {"OVERLAP": 1}, True),
        (65, False, {"TMA": 1}, False),
        (16, True, None, False),
        (17, True, None, True),
    ],
)
def test_which_products_take_groups_of_warps(
    rows: int, four: bool, tiles: dict[str, int] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper; a CPU and other GPUs have none."""
    x = int8_rows(rows, 256)
    weight = int4_weight(40, 256, 128)[0] if four else int8_weight(40, 256)
    assert not int8_linear_module._by_warpgroups(x, weight, tiles)
    monkeypatch.setattr(int8_linear_module, "has_warpgroups", lambda device: True)
    assert int8_linear_module._by_warpgroups(x, weight, tiles) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("four", [False, True])
def test_parts_of_sums_are_exact(rows: int, outputs: int, width: int, four: bool) -> None:
    """By every choice of tiles, in parts of which the last ends past the last column."""
    x, weight = int8_rows(rows, width, "cuda"), weight_of(outputs, width, four)
    expected = int8_sums(x.values, as_bytes(weight).values)
    for tiles in choices(x, four, 4):
        parts = warpgroup_parts_triton(x, weight, tiles | {"SPLITS": 3})
        assert isinstance(parts, Int8Sums)
        assert torch.equal(parts.parts.sum(0), expected.long()), tiles


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "added"), ENDS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("four", [False, True])
def test_ends_are_those_of_the_other_kernel(
    dtype: torch.dtype, added: tuple[str, ...], rows: int, outputs: int, width: int, four: bool
) -> None:
    """To the bit, so that a row has one result on any path; into poisoned memory, and into the residual."""
    x, weight = int8_rows(rows, width, "cuda"), weight_of(outputs, width, four)
    bias = normal(outputs, dtype=dtype, device="cuda", seed=3) if "bias" in added else None
    residual = normal(rows, outputs, dtype=dtype, device="cuda", seed=4) if "residual" in added else None
    whole = as_bytes(weight)
    expected = int8_matmul_triton(
        x, Int8Weight(whole.values.contiguous(), whole.scales), dtype, bias, residual
    )
    wide = (x.values.double() * x.scales.double()[:, None]) @ (
        whole.values.double() * whole.scales.double()[:, None]
    ).T
    for term in (bias, residual):
        wide = wide if term is None else wide + term.double()
    assert_near(expected, wide)
    for tiles in choices(x, four, dtype.itemsize):
        out = torch.full((rows, outputs), float("nan"), dtype=dtype, device="cuda")
        assert warpgroup_matmul_triton(x, weight, dtype, bias, residual, out, tiles) is out
        assert torch.equal(out, expected), tiles
    if residual is not None:
        assert torch.equal(warpgroup_matmul_triton(x, weight, dtype, bias, residual, residual), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 65, 128])
def test_groups_of_a_head(rows: int) -> None:
    x, weight = int8_rows(rows, 4096, "cuda", 128), int4_weight(4096, 4096, 128, "cuda")[0]
    whole = expanded(weight)
    expected = int8_matmul_triton(x, Int8Weight(whole.values.contiguous(), whole.scales), torch.float32)
    for tiles in choices(x, True, 4):
        assert torch.equal(warpgroup_matmul_triton(x, weight, torch.float32, tiles=tiles), expected), tiles
        parts = warpgroup_parts_triton(x, weight, tiles | {"SPLITS": 2})
        assert isinstance(parts, torch.Tensor)
        torch.testing.assert_close(parts.sum(0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("four", [False, True])
def test_a_row_does_not_depend_on_the_others(four: bool) -> None:
    """By whatever kernel so many rows take."""
    x, weight = int8_rows(700, 4096, "cuda"), weight_of(4096, 4096, four)
    expected = int8_linear(x, weight, torch.bfloat16)
    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512):
        some = Int8Rows(x.values[:rows], x.scales[:rows])
        assert torch.equal(int8_linear(some, weight, torch.bfloat16), expected[:rows]), rows
        if rows <= 256:
            parts = int8_linear_parts(some, weight)
            assert isinstance(parts, Int8Sums)
            assert torch.equal(parts.parts.sum(0), int8_sums(some.values, as_bytes(weight).values).long())


@pytest.mark.gpu
def test_rows_that_do_not_start_at_16_bytes_are_left_to_the_other_kernel() -> None:
    x = int8_rows(300, 1001, "cuda")
    weight = int8_weight(512, 1001, "cuda")
    assert not takes_warpgroups(x, weight)
    wide = (x.values.double() * x.scales.double()[:, None]) @ (
        weight.values.double() * weight.scales.double()[:, None]
    ).T
    assert_near(int8_linear(x, weight, torch.float16), wide)
