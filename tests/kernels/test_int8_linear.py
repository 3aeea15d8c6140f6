"""Products in 8 bits of any number of rows: the exact sums, bit for bit, and what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.product_candidates import large_int8_candidates, small_int8_candidates
from ingot.errors import IngotError
from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.product.int8.int8_matmul import int8_matmul_triton
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight, int8_sums
from ingot.kernels.tiles.int8_tiles import (
    Machine,
    large_int8_bytes,
    large_int8_tiles,
    machine_of,
    small_int8_tiles,
    tile_outputs,
)
from tests.kernels.int8_case import LARGE_TILES, int8_rows, int8_weight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

SHAPES = [(65, 33, 48), (130, 96, 64), (100, 40, 172), (66, 5, 1), (200, 70, 80)]
KERNELS = IMPLEMENTATIONS[1:]
MACHINE = Machine(132, True, True, 227 << 10)  # an H200


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [*SHAPES, (1, 40, 64)])
@pytest.mark.parametrize(
    "tiles",
    [
        {"TMA": 1},
        {"TMA": 4},
        {"TMA": 4, "PIECES": 2, "PROGRAMS": 0},
        {"TMA": 1, "TOGETHER": 2},
        {"TMA": 4, "MORE_N": 16, "PROGRAMS": 2},
        {"TMA": 1, "MORE_N": 32, "PIECES": 2},
    ],
)
def test_sums_are_exact(
    impl: Implementation, rows: int, outputs: int, width: int, tiles: dict[str, int]
) -> None:
    x, weight = int8_rows(rows, width, impl.device), int8_weight(outputs, width, impl.device)
    sums = int8_matmul_triton(x, weight, torch.int32, tiles=LARGE_TILES | tiles)
    assert torch.equal(sums, int8_sums(x.values, weight.values))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(3, 20, 70), *SHAPES])
@pytest.mark.parametrize("kind", ["rows", "static", "groups"])
@pytest.mark.parametrize("sums", [False, True])
def test_linear(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, kind: str, sums: bool
) -> None:
    group = {48: 16, 64: 32, 80: 80, 172: 43, 70: 14}.get(width, 1) if kind == "groups" else 0
    x = int8_rows(rows, width, impl.device, group, kind == "static")
    weight = int8_weight(outputs, width, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3) if sums else None
    residual = normal(rows, outputs + 2, dtype=dtype, device=impl.device, seed=4)[:, :outputs]
    tiles = {name: LARGE_TILES[name] for name in ("BLOCK_N", "num_stages")} | {"num_warps": 4}
    y = impl(int8_linear)(x, weight, dtype, bias, residual if sums else None, tiles=tiles)
    wide = x.values.double() * x.scales.double().repeat_interleave(group, 1) if group else None
    wide = x.values.double() * x.scales.double()[:, None] if wide is None else wide
    expected = wide @ (weight.values.double() * weight.scales.double()[:, None]).T
    if bias is not None:
        expected = expected + bias.double() + residual.double()
    assert y.dtype == dtype
    assert_near(y, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [4, 70])
def test_it_adds_in_place(impl: Implementation, rows: int) -> None:
    x, weight = int8_rows(rows, 64, impl.device), int8_weight(24, 64, impl.device)
    stream = normal(rows, 24, dtype=torch.float16, device=impl.device)
    op = impl(int8_linear)
    expected = op(x, weight, torch.float16, None, stream)
    assert op(x, weight, torch.float16, None, stream, out=stream) is stream
    assert torch.equal(stream, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_does_not_depend_on_its_company(impl: Implementation) -> None:
    x, weight = int8_rows(130, 96, impl.device), int8_weight(40, 96, impl.device)
    op = impl(int8_linear)
    many = op(x, weight, torch.float16)
    for count in (1, 8, 40, 70):
        assert torch.equal(
            op(Int8Rows(x.values[:count], x.scales[:count]), weight, torch.float16), many[:count]
        )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: Implementation) -> None:
    x, weight = int8_rows(70, 16, impl.device), int8_weight(9, 16, impl.device)
    none = Int8Rows(x.values[:0], x.scales[:0])
    assert impl(int8_linear)(none, weight, torch.float16).shape == (0, 9)


def test_descriptors_are_refused_where_they_cannot_be() -> None:
    x, weight = int8_rows(70, 172), int8_weight(9, 172)
    with pytest.raises(IngotError, match="tensor descriptors"):
        int8_matmul_triton(x, weight, torch.float16, tiles={"TMA": 2})
    padded = Int8Weight(torch.nn.functional.pad(weight.values, (0, 4))[:, :172], weight.scales)
    rows = Int8Rows(torch.nn.functional.pad(x.values, (0, 4))[:, :172], x.scales)
    sums = int8_matmul_triton(rows, padded, torch.int32, tiles=LARGE_TILES | {"TMA": 2})
    assert torch.equal(sums, int8_sums(x.values, weight.values))


def test_refused() -> None:
    x, weight = int8_rows(2, 8), int8_weight(6, 8)
    with pytest.raises(IngotError, match="the result has the wrong dtype"):
        int8_linear(x, weight, torch.int32)
    with pytest.raises(IngotError, match="bias has the wrong dtype"):
        int8_linear(x, weight, torch.float16, torch.zeros(6, dtype=torch.bfloat16))
    with pytest.raises(IngotError, match="residual has the wrong shape"):
        int8_linear(x, weight, torch.float32, None, torch.zeros(2, 7))
    with pytest.raises(IngotError, match="out has the wrong shape"):
        int8_linear(x, weight, torch.float32, out=torch.zeros(3, 6))
    with pytest.raises(IngotError, match="weight is on another device"):
        int8_linear(x, Int8Weight(weight.values.to("meta"), weight.scales), torch.float32)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 300, 2048])
def test_candidates_begin_with_the_default(rows: int, group: int) -> None:
    cpu = torch.device("cpu")
    found: list[Any]
    if rows <= 64:
        found = small_int8_candidates(small_int8_tiles(rows, 4096, 4096, cpu))
        assert found[0] == small_int8_tiles(rows, 4096, 4096, cpu)
    else:
        default = large_int8_tiles(rows, 4096, 4096, 2, MACHINE, group)
        found = large_int8_candidates(default, 2, MACHINE.shared, group)
        assert found[0] == default
    assert len(found) >= 5
    assert all(tiles.keys() == found[0].keys() for tiles in found)
    assert all(tiles not in found[:place] for place, tiles in enumerate(found))


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        (65, 4096, (64, 64, 1)),
        (128, 12288, (128, 128, 1)),
        (128, 22016, (128, 192, 1)),  # 115 tiles instead of 172, for 132 multiprocessors
        (256, 12288, (128, 192, 1)),
        (192, 22016, (256, 192, 1)),
        (256, 22016, (256, 192, 1)),
        (2048, 22016, (128, 128, 2)),
        (4096, 12288, (128, 128, 2)),
    ],
)
def test_tiles_are_those_that_were_fastest(rows: int, outputs: int, expected: tuple[int, ...]) -> None:
    """At the shapes of a 7B on an H200."""
    tiles = large_int8_tiles(rows, outputs, 4096, 2, MACHINE)
    assert (tiles["BLOCK_M"], tile_outputs(tiles), tiles["PROGRAMS"]) == expected


def test_stages_fit_what_a_program_may_use() -> None:
    tiles = large_int8_tiles(2048, 22016, 4096, 2, Machine(108, False, False, 163 << 10))
    assert (tiles["BLOCK_N"], tiles["num_stages"], tiles["TMA"]) == (256, 2, 1)
    stages = {size: large_int8_tiles(2048, 22016, 4096, size, MACHINE)["num_stages"] for size in (2, 4)}
    assert stages == {2: 3, 4: 2}, "a result of 4 bytes takes the room of a stage"


@pytest.mark.grid
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [0, 32, 128, 256])
@pytest.mark.parametrize("shared", [163 << 10, 227 << 10])
@pytest.mark.parametrize("split", [False, True])
def test_candidates_fit_what_a_program_may_use(itemsize: int, group: int, shared: int, split: bool) -> None:
    for rows in (65, 128, 300, 2048):
        machine = Machine(132, True, True, shared)
        default = large_int8_tiles(rows, 4096, 4096, itemsize, machine, group, split=split)
        found = large_int8_candidates(default, itemsize, shared, group, split)
        assert found[0] == default
        for tiles in found:
            assert large_int8_bytes(tiles, itemsize) <= shared
            assert (large_int8_bytes(tiles, itemsize) + 1024) * tiles["PROGRAMS"] <= shared + 1024
        assert all(tiles["num_stages"] >= 2 for tiles in found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000, 2048, 4095, 4096])
@pytest.mark.parametrize(
    ("outputs", "width"),
    [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (4093, 4000), (100, 172)],
)
def test_sums_on_a_gpu(rows: int, outputs: int, width: int) -> None:
    """Every default tile of a 7B and of odd shapes: bit-equal to the reference product."""
    generator = torch.Generator("cuda").manual_seed(rows)
    numbers = [
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8, device="cuda")
        for shape in ((rows, width), (outputs, width))
    ]
    x = Int8Rows(numbers[0], torch.ones(rows, device="cuda"))
    weight = Int8Weight(numbers[1], torch.ones(outputs, device="cuda"))
    torch.cuda.synchronize()
    expected = int8_sums(x.values, weight.values)
    if rows > 64:
        assert torch.equal(int8_matmul_triton(x, weight, torch.int32), expected)
    y = int8_linear(x, weight, torch.float32)
    assert torch.equal(y, expected.float())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 2048])
@pytest.mark.parametrize("group", [0, 128])
def test_every_candidate_on_a_gpu(rows: int, group: int) -> None:
    x, weight = int8_rows(rows, 4096, "cuda", group), int8_weight(4096, 4096, "cuda")
    torch.cuda.synchronize()
    expected = int8_linear(x, weight, torch.float32)
    machine = machine_of(x.values.device)
    default = large_int8_tiles(rows, 4096, 4096, 4, machine, group)
    for tiles in large_int8_candidates(default, 4, machine.shared, group):
        y = int8_linear(x, weight, torch.float32, tiles=tiles)
        assert torch.equal(y, expected), tiles
