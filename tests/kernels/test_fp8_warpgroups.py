"""Products in blocks by groups of warps (Hopper), against fp64, by every choice of tiles; who takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ingot.kernels.product.int8.int8_linear as int8_linear_module
from ingot.kernels.product.int8 import warpgroup_matmul
from ingot.kernels.product.int8.int8_linear import INVARIANT_FP8_TILES, int8_linear, int8_linear_parts
from ingot.kernels.product.int8.warpgroup_matmul import (
    kept_steps,
    takes_warpgroups,
    warpgroup_matmul_triton,
)
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight
from ingot.kernels.tiles.int8_tiles import Machine, machine_of
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.tiles.warpgroup_tiles import rated, warpgroup_tiles
from tests.kernels.compile_kernels import caught_launches
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import normal
from tests.kernels.test_fp8_products import assert_product, exact_blocks, fp8_blocks, fp8_rows

HOPPER = Machine(132, True, True, 227 << 10)
SHAPES = [(1, 384, 256), (5, 4160, 4096), (17, 200, 640), (33, 2056, 1024), (64, 4096, 3072)]


def test_which_operands_are_read() -> None:
    x, weight = fp8_rows(8, 256, group=128), fp8_blocks(200, 256)
    assert takes_warpgroups(x, weight)
    assert takes_warpgroups(fp8_rows(MAX_ROWS, 256, group=128), weight)
    assert not takes_warpgroups(fp8_rows(MAX_ROWS + 1, 256, group=128), weight)
    by_channel = Int8Weight(weight.values, torch.ones(200))
    assert not takes_warpgroups(fp8_rows(8, 256), by_channel)
    assert not takes_warpgroups(x, by_channel)
    shifted = torch.zeros(8, 272, dtype=torch.uint8).view(E4M3)[:, 8:264]
    assert not takes_warpgroups(Int8Rows(shifted, x.scales, 128), weight)
    apart = torch.zeros(200, 264, dtype=torch.uint8).view(E4M3)[:, :256]
    assert not takes_warpgroups(x, Int8Weight(apart, weight.scales))


@pytest.mark.parametrize(
    ("rows", "tiles", "expected"),
    [
        (0, None, False),
        (1, None, True),
        (MAX_ROWS, None, True),
        (MAX_ROWS + 1, None, False),
        (8, {"GROUPS": 1}, True),
        (8, {"BLOCK_N": 64}, False),
        (8, INVARIANT_FP8_TILES, False),
    ],
)
def test_how_many_rows_take_them(
    rows: int, tiles: dict[str, int] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper; the tiles of ``batch_invariant`` are those of the other kernel."""
    x, weight = fp8_rows(max(rows, 1), 256, group=128), fp8_blocks(200, 256)
    x = Int8Rows(x.values[:rows], x.scales[:rows], 128)
    assert not int8_linear_module._by_warpgroups(x, weight, tiles)
    monkeypatch.setattr(int8_linear_module, "has_warpgroups", lambda device: True)
    assert int8_linear_module._by_warpgroups(x, weight, tiles) == expected


def launch_of(x: Int8Rows, weight: Int8Weight) -> dict[str, Any]:
    """Arguments of the kernel for a product of 16 bits."""
    tiles = dict(next(rated(len(x.values), 2, HOPPER, x.group, False))[1])
    (found,) = caught_launches(lambda: warpgroup_matmul_triton(x, weight, torch.float16, tiles=tiles))
    kernel, args, kwargs = found
    return dict(zip(kernel.arg_names, args, strict=False)) | kwargs


def test_the_weight_is_read_early_unless_a_kernel_writes_it() -> None:
    x, weight = fp8_rows(8, 512, group=128), fp8_blocks(300, 512)
    given = launch_of(x, weight)
    assert given["LOOP"].EARLY
    assert given["outputs"] == 300
    assert given["weight"][0] is weight.scales
    assert given["weight"][3] == 4  # a row of blocks has so many scales
    assert given["x"] == (x.scales, 4)
    assert not launch_of(x, Int8Weight(weight.values, weight.scales, temporary=True))["LOOP"].EARLY
    assert not launch_of(int8_rows(300, 512), int8_weight(300, 512))["LOOP"].EARLY


def test_tiles_follow_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in blocks has a row of scales per 128 of them."""
    monkeypatch.setattr(warpgroup_matmul, "machine_of", lambda device: HOPPER)
    x, weight = fp8_rows(8, 512, group=128), fp8_blocks(24576, 512)
    assert warpgroup_matmul._choice(x, weight, 2, False, None) == warpgroup_tiles(
        8, 24576, 512, 2, HOPPER, 128
    )
    assert warpgroup_matmul._choice(x, weight, 2, False, {"GROUPS": 1})["GROUPS"] == 1


@pytest.mark.parametrize(
    ("rows", "columns", "splits", "groups", "expected"),
    [
        (16, 4096, 1, 1, 0),
        (32, 4096, 1, 1, 32),
        (64, 4096, 1, 3, 32),
        (64, 4224, 1, 3, 0),
        (64, 12288, 2, 1, 64),
    ],
)
def test_how_many_steps_of_scales_are_kept(
    rows: int, columns: int, splits: int, groups: int, expected: int
) -> None:
    """Those of a part, as far as there is room."""
    assert kept_steps(columns, splits, groups, rows) == expected


@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.parametrize("split", [False, True])
def test_kept_scales_have_room(rows: int, split: bool) -> None:
    """Beside the operands of all steps, whatever tiles are chosen."""
    for _, tiles in rated(rows, 4 if split else 2, HOPPER, 128, False, split):
        groups, block = tiles["GROUPS"], tiles["BLOCK_T"]
        operands = tiles["num_stages"] * 128 * (block + 64 * groups)
        pieces = tiles["PIECE"] * 64 * 2 * groups * (2 if block > tiles["PIECE"] else 1) * (not split)
        most = max(kept_steps(128 * steps, 1, groups, block) for steps in range(1, 1000))
        assert tiles["num_stages"] >= 3
        assert (operands + pieces + 4 * most * groups * block + 1024) * tiles["PROGRAMS"] <= 228 << 10


@pytest.mark.parametrize(
    ("rows", "shape", "split", "expected"),
    [
        (8, (6144, 4096), False, (1, 1, 1)),
        (64, (6144, 4096), False, (1, 1, 1)),
        (8, (24576, 4096), False, (3, 1, 1)),
        (64, (24576, 4096), False, (3, 1, 1)),
        (8, (4096, 4096), True, (1, 2, 4)),
        (64, (4096, 4096), True, (1, 2, 4)),
        (8, (4096, 12288), True, (1, 2, 4)),
        (64, (4096, 12288), True, (1, 2, 4)),
    ],
)
def test_tiles_are_the_fastest_on_an_h200(
    rows: int, shape: tuple[int, int], split: bool, expected: tuple[int, int, int]
) -> None:
    """Of those tried: docs/performance/int8.md."""
    tiles = warpgroup_tiles(rows, *shape, 4 if split else 2, HOPPER, 128, False, split)
    assert (tiles["GROUPS"], tiles["PROGRAMS"], tiles["SPLITS"]) == expected


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (24576, 4096), (4096, 12288), (40, 128)])
@pytest.mark.parametrize("split", [False, True])
def test_a_tile_has_all_rows(rows: int, shape: tuple[int, int], split: bool) -> None:
    """So that the weight is read once."""
    tiles = warpgroup_tiles(rows, *shape, 4 if split else 2, HOPPER, 128, False, split)
    assert rows <= tiles["BLOCK_T"] < max(2 * rows, 16)


def added_up(x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
    parts = int8_linear_parts(x, weight)
    assert isinstance(parts, torch.Tensor)
    return parts.sum(0)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_whole_sums_and_parts(rows: int, outputs: int, width: int) -> None:
    """By every choice of tiles; of the parts the last ends past the last column."""
    x, weight = fp8_rows(rows, width, "cuda", 128), fp8_blocks(outputs, width, "cuda")
    expected = exact_blocks(x, weight)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for _, tiles in rated(rows, dtype.itemsize, machine_of(x.values.device), 128):
            out = poisoned(rows, outputs, dtype=dtype)
            assert_product(warpgroup_matmul_triton(x, weight, dtype, None, None, out, tiles), expected)
    for _, tiles in rated(rows, 4, machine_of(x.values.device), 128, False, True):
        for splits in (1, 2, 3):
            parts = poisoned(splits, rows, outputs)
            warpgroup_matmul._launch(x, weight, None, None, parts.flatten(0, 1), tiles | {"SPLITS": splits})
            assert_product(parts.sum(0), expected)
    assert_product(added_up(x, weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_bias_and_residual(rows: int) -> None:
    x, weight = fp8_rows(rows, 1024, "cuda", 128), fp8_blocks(1032, 1024, "cuda")
    bias = normal(1032, dtype=torch.bfloat16, device="cuda", seed=3)
    residual = normal(rows, 1032, dtype=torch.bfloat16, device="cuda", seed=4)
    expected = exact_blocks(x, weight) + bias.double().cpu() + residual.double().cpu()
    for out in (poisoned(rows, 1032, dtype=torch.bfloat16), residual):
        assert_product(int8_linear(x, weight, torch.bfloat16, bias, residual, out), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_early_weights_and_late_rows(rows: int) -> None:
    """Rows that the kernel before writes, many times over: all are those of its end."""
    weight = fp8_blocks(2048, 2048, "cuda")
    given = [fp8_rows(rows, 2048, "cuda", 128) for _ in range(2)]
    x = Int8Rows(torch.empty_like(given[0].values), torch.empty_like(given[0].scales), 128)
    expected = [added_up(one, weight) for one in given]
    for turn in range(200):
        x.values.copy_(given[turn % 2].values)
        x.scales.copy_(given[turn % 2].scales)
        assert torch.equal(added_up(x, weight), expected[turn % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 32, 64])
def test_a_row_has_the_same_bits_beside_any_others_of_one_tile(rows: int) -> None:
    """Products of equally wide tiles sum a row in one order."""
    weight = fp8_blocks(4096, 4096, "cuda")
    x, other = (fp8_rows(rows, 4096, "cuda", 128) for _ in range(2))
    mixed = Int8Rows(
        torch.cat([x.values[:1], other.values[1:]]), torch.cat([x.scales[:1], other.scales[1:]]), 128
    )
    found, again = (int8_linear(one, weight, torch.float32) for one in (x, mixed))
    assert torch.equal(found[0], again[0])
