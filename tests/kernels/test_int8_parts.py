"""Parts of the sums of products in 8 bits of 65 rows and more: they add up to the whole, bit for bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.product_candidates import large_int8_candidates
from ingot.errors import IngotError
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_parts_triton
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight, int8_product, int8_sums
from ingot.kernels.tiles.int8_tiles import (
    DECODE_ROWS,
    Machine,
    large_int8_tiles,
    machine_of,
)
from tests.kernels.int8_case import LARGE_TILES, int8_rows, int8_weight
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, launched, normal

SHAPES = [(65, 33, 48), (130, 96, 160), (100, 40, 172), (66, 5, 1)]  # of 2, 5, 6 steps and 1
MACHINE = Machine(132, True, True, 227 << 10)  # an H200
KERNELS = IMPLEMENTATIONS[1:]


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "tiles", [{"TMA": 1}, {"TMA": 4}, {"PIECES": 2}, {"PROGRAMS": 1, "TOGETHER": 2}, {"MORE_N": 16}]
)
def test_sums_are_exact(
    impl: Implementation, rows: int, outputs: int, width: int, splits: int, tiles: dict[str, int]
) -> None:
    """In any number of parts, some without columns."""
    x, weight = int8_rows(rows, width, impl.device), int8_weight(outputs, width, impl.device)
    sums = launched(int8_linear_parts)(x, weight, LARGE_TILES | {"SPLITS": splits} | tiles)
    assert isinstance(sums, Int8Sums)
    assert sums.parts.shape == (splits, rows, outputs)
    assert sums.parts.dtype == torch.int32
    assert torch.equal(sums.parts.sum(0), int8_sums(x.values, weight.values).long())
    torch.testing.assert_close(sums.product(), int8_product(x, weight, torch.float32), rtol=0, atol=0)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "outputs", "width", "group"), [(65, 20, 96, 32), (130, 33, 320, 64), (70, 16, 240, 80)]
)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_groups_have_scales_of_their_own(
    impl: Implementation, rows: int, outputs: int, width: int, group: int, splits: int
) -> None:
    x, weight = int8_rows(rows, width, impl.device, group), int8_weight(outputs, width, impl.device)
    tiles = {"BLOCK_M": 64, "BLOCK_N": 16, "num_stages": 2, "SPLITS": splits}
    op = impl(int8_linear_parts)
    parts = op(x, weight, tiles)
    assert isinstance(parts, torch.Tensor)
    wide = x.values.double().unflatten(1, (-1, group)) * x.scales.double()[..., None]
    expected = wide.flatten(1) @ (weight.values.double() * weight.scales.double()[:, None]).T
    torch.testing.assert_close(parts.double().sum(0), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(op(x, weight, tiles), parts)


@pytest.mark.parametrize("impl", KERNELS)
def test_a_part_of_groups_is_the_product_of_its_columns(impl: Implementation) -> None:
    """Its own scales, in the order of the whole product, to the bit."""
    x, weight = int8_rows(70, 320, impl.device, 64), int8_weight(24, 320, impl.device)
    tiles = LARGE_TILES | {"BLOCK_N": 16}
    parts = launched(int8_linear_parts)(x, weight, tiles | {"SPLITS": 2})
    assert isinstance(parts, torch.Tensor)
    for part, first, last in zip(parts, (0, 192), (192, 320), strict=True):
        columns = slice(first, last)
        own = Int8Rows(x.values[:, columns], x.scales[:, first // 64 : last // 64].contiguous(), 64)
        rest = Int8Weight(weight.values[:, columns], weight.scales)
        assert torch.equal(part, launched(int8_linear)(own, rest, torch.float32, tiles=tiles))


@pytest.mark.parametrize("impl", KERNELS)
def test_parts_end_in_what_the_whole_product_gives(impl: Implementation) -> None:
    """Norm and stream of fp32, whose sums with bias and residual round in another order."""
    x, weight = int8_rows(70, 160, impl.device), int8_weight(40, 160, impl.device)
    stream, norm, bias = (
        normal(*n, dtype=torch.float32, device=impl.device) for n in ((70, 40), (40,), (40,))
    )
    parts = launched(int8_linear_parts)(x, weight, LARGE_TILES | {"SPLITS": 2})
    y, s = launched(sum_norm)(parts, stream, norm, 1e-6, bias)
    expected_s = launched(int8_linear)(x, weight, torch.float32, bias, stream, tiles=LARGE_TILES)
    torch.testing.assert_close(s, expected_s, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(y, launched(rms_norm)(expected_s, norm, 1e-6)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows_and_too_many(impl: Implementation) -> None:
    weight = int8_weight(9, 16, impl.device)
    none = int8_rows(70, 16, impl.device)
    none = Int8Rows(none.values[:0], none.scales[:0])
    assert int8_linear_parts(none, weight).parts.shape[1:] == (0, 9)
    if impl.interpreted or impl.device == "cuda":
        assert int8_matmul_parts_triton(none, weight).parts.shape[1:] == (0, 9)
    with pytest.raises(IngotError, match="number of rows"):
        int8_linear_parts(int8_rows(DECODE_ROWS + 1, 16, impl.device), weight)


@pytest.mark.grid
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("rows", [65, 96, 128, 192, 256])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 4096), (4096, 11008), (3584, 18944), (8192, 8192)])
def test_parts_fill_the_gpu_once(rows: int, outputs: int, width: int, group: int) -> None:
    """The products that end in the stream, of a 7B and of others: no second wave, few idle."""
    tiles = large_int8_tiles(rows, outputs, width, 4, MACHINE, group, split=True)
    programs = -(-rows // tiles["BLOCK_M"]) * -(-outputs // tiles["BLOCK_N"]) * tiles["SPLITS"]
    assert 96 <= programs <= 132
    assert tiles["SPLITS"] > 1 or outputs > 4096


@pytest.mark.parametrize("group", [0, 128])
def test_candidates_of_parts(group: int) -> None:
    default = large_int8_tiles(128, 4096, 11008, 4, MACHINE, group, split=True)
    found = large_int8_candidates(default, 4, MACHINE.shared, group, split=True)
    assert {tiles["SPLITS"] for tiles in found} == {1, 2, 4, 8}
    assert {tiles["PROGRAMS"] for tiles in found} == {0}
    areas = {(tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["num_stages"]) for tiles in found}
    assert {(128, 128, 3), (128, 64, 3)} <= areas, "two programs a multiprocessor"


def test_only_few_rows_start_early_and_whole_products_are_not_split() -> None:
    for rows, early in ((65, 2), (DECODE_ROWS, 2), (DECODE_ROWS + 1, 1), (2048, 1)):
        tiles = large_int8_tiles(rows, 12288, 4096, 2, MACHINE)
        assert (tiles["OVERLAP"], tiles["SPLITS"]) == (early, 1)
    older = large_int8_tiles(65, 12288, 4096, 2, Machine(108, False, False, 163 << 10))
    assert older["OVERLAP"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 100, 128, 129, 200, 256])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 11008), (4096, 4096), (4093, 4000), (100, 172)])
def test_every_candidate_on_a_gpu(rows: int, outputs: int, width: int) -> None:
    """The exact sums; of groups what the default gives, but for the order of sums."""
    for group in (0, 128) if width % 128 == 0 else (0,):
        x, weight = int8_rows(rows, width, "cuda", group), int8_weight(outputs, width, "cuda")
        torch.cuda.synchronize()
        machine, aligned = machine_of(x.values.device), width % 16 == 0
        default = large_int8_tiles(rows, outputs, width, 4, machine, group, aligned, split=True)
        whole = int8_product(x, weight, torch.float32)
        for tiles in large_int8_candidates(default, 4, machine.shared, group, split=True):
            sums = int8_linear_parts(x, weight, tiles)
            if isinstance(sums, Int8Sums):
                assert torch.equal(sums.parts.sum(0), int8_sums(x.values, weight.values).long()), tiles
            else:
                torch.testing.assert_close(sums.sum(0), whole, rtol=1e-4, atol=1e-3)
                assert torch.equal(int8_linear_parts(x, weight, tiles), sums), tiles
