"""How products of few rows are launched: which loop, and that a launch works nothing out again."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product.few_rows.resolved_launch import (
    GATE_UP,
    LINEAR,
    PARTS,
    ResolvedLaunch,
    float_launch,
)
from ingot.kernels.tiles import product_tiles
from ingot.kernels.tiles.product_tiles import WeightShape, small_tiles, split_tiles
from ingot.kernels.tiles.tile_tables import TABLES, chosen, is_narrow, listed
from ingot.kernels.weight.stored_weight import StoredWeight, stored
from tests.kernels.compile_cases import in_bits


def weight_of(bits: int, group: int = 0, outputs: int = 4096) -> StoredWeight:
    if bits == 16:
        return stored(torch.empty(outputs, 4096, dtype=torch.float16, device="meta"))
    return in_bits(bits, outputs, 4096, group, False, torch.float16)


def launch_of(
    rows: int, weight: StoredWeight, op: tuple[str, int, int] = LINEAR, **tiles: int
) -> ResolvedLaunch:
    return float_launch(op, torch.empty(rows, 4096, dtype=torch.float16, device="meta"), weight, tiles)


@pytest.mark.parametrize(
    ("rows", "bits", "group", "outputs", "kind"),
    [
        (1, 16, 0, 4096, "vectors"),
        (2, 16, 0, 4096, "matrix"),
        (1, 4, 128, 4096, "fragments"),
        (8, 8, 0, 4096, "fragments"),
        (9, 4, 128, 4096, "packed"),
        (8, 8, 64, 4096, "packed"),  # 8 bits in groups are not loaded so
        (8, 4, 0, 4090, "packed"),  # no whole blocks of rows
    ],
)
def test_the_loop(rows: int, bits: int, group: int, outputs: int, kind: str) -> None:
    assert kind == launch_of(rows, weight_of(bits, group, outputs)).loop.KIND


def test_a_plan_is_made_once_for_a_shape() -> None:
    """Other weights of the shape share it; other rows, ops and tiles have their own."""
    first = launch_of(8, weight_of(16))
    assert launch_of(8, weight_of(16)) is first
    others = [
        launch_of(7, weight_of(16)),
        launch_of(8, weight_of(16), PARTS),
        launch_of(8, weight_of(16), GATE_UP),
    ]
    others += [launch_of(8, weight_of(16), BLOCK_N=16), launch_of(8, weight_of(16, outputs=4080))]
    assert all(other is not first for other in others)
    assert launch_of(8, weight_of(16), BLOCK_N=16).loop.BLOCK_N == 16
    with pytest.raises(IngotError, match="BLOCK_T is smaller than the number of rows"):
        launch_of(9, weight_of(16), BLOCK_T=8)


def test_parts_are_of_the_columns() -> None:
    launch = launch_of(8, weight_of(16), PARTS, SPLITS=64, BLOCK_K=256)
    assert (launch.splits, launch.loop.STEPS) == (16, 16)  # no part without columns
    assert launch_of(8, weight_of(16)).splits == 1


def test_the_first_choice_that_fits_is_taken() -> None:
    assert chosen("dense", 8, 16383)["BLOCK_N"] == 32
    assert chosen("dense", 8, 16384)["BLOCK_N"] == 64
    wide = [chosen("dense", 8, size)["PREFETCH"] for size in (6143, 6144, 8191, 8192)]
    assert wide == [1, 256, 256, 1]
    assert [chosen("dense", 64, size)["num_stages"] for size in (6143, 6144, 8192)] == [5, 8, 5]
    assert [chosen("dense", 8, size)["BLOCK_N"] for size in (24575, 24576, 32768)] == [64, 128, 64]
    halves = [chosen("dense_parts", 64, size)["SPLITS"] for size in (4095, 4096, 8193, 14336)]
    assert halves == [4, 2, 4, 2]
    assert chosen("dense", 9, 65535) == chosen("dense", 16, 16384) != chosen("dense", 16, 65536)
    copied = chosen("packed_8_bits", 64, 22016, lambda tiles: not tiles["DIRECT"])
    assert (copied["BLOCK_N"], copied["AHEAD"], copied["DIRECT"]) == (64, 2, 0)
    joined = [chosen("dense_parts", 8, size)["SPLITS"] for size in (11008, 12288, 14336)]
    assert joined == [8, 4, 4]
    gates = [chosen("packed_8_bits", rows, 28672) for rows in (128, 129)]
    assert [(tiles["BLOCK_T"], tiles["BLOCK_N"]) for tiles in gates] == [(128, 256), (256, 128)]
    assert [tiles["BLOCK_N"] for tiles in listed("try_dense", 8)] == [64, 32, 64, 64]
    assert listed("try_dense", 32) == listed("try_dense", 64)


META = torch.device("meta")


@pytest.mark.parametrize(("outputs", "programs"), [(4096, 4), (6144, 8), (8192, 4), (12288, 4), (28672, 8)])
def test_programs_of_one_row(outputs: int, programs: int) -> None:
    assert small_tiles(1, WeightShape(outputs, 4096), 2, META)["PROGRAMS"] == programs


WHISPER = [384, 512, 768, 1024, 1280]


@pytest.mark.parametrize("size", WHISPER)
def test_products_of_a_narrow_model_are_enough_programs(size: int) -> None:
    """A 7B's tiles would be 3 to 40 of them."""
    for outputs, inputs in ((size, size), (3 * size, size), (4 * size, size), (size, 4 * size)):
        assert is_narrow(outputs, inputs)
        shape = WeightShape(outputs, inputs)
        whole, split = small_tiles(64, shape, 2, META), split_tiles(64, shape, 2, META)
        parts = min(split["SPLITS"], inputs // split["BLOCK_K"])
        assert -(-outputs // split["BLOCK_N"]) * parts >= 36
        if outputs <= 1024:
            assert -(-outputs // whole["BLOCK_N"]) >= 24


def test_what_is_narrow() -> None:
    assert not is_narrow(4096, 4096)
    assert not is_narrow(51866, 1280), "a head has outputs enough"
    wide, head = WeightShape(4096, 4096), WeightShape(51866, 1280)
    assert small_tiles(64, wide, 2, META)["BLOCK_N"] == chosen("dense", 64, 4096)["BLOCK_N"] == 128
    assert small_tiles(64, head, 2, META)["PROGRAMS"] == chosen("dense", 64, 51866)["PROGRAMS"] == 3
    narrow = WeightShape(768, 768)
    assert small_tiles(8, narrow, 2, META)["BLOCK_N"] == chosen("dense", 8, 768)["BLOCK_N"]
    assert small_tiles(64, narrow, 2, META, narrow=False)["BLOCK_N"] == 128
    assert small_tiles(1, WeightShape(768, 768, 8), 2, META)["BLOCK_N"] == 16


def test_pairs_of_a_narrow_weight_of_8_bits_go_straight_into_registers() -> None:
    x = torch.empty(1, 768, dtype=torch.float16, device="meta")
    weight = in_bits(8, 1152, 768, 0, False, torch.float16)
    for op in (LINEAR, ("qkv", 64, 64), GATE_UP):
        assert float_launch(op, x, weight).loop.KIND == "fragments"


@pytest.mark.parametrize(
    ("dtype", "group", "block"),
    [(torch.bfloat16, 128, 64), (torch.bfloat16, 64, 32), (torch.float16, 128, 32), (torch.bfloat16, 0, 64)],
)
def test_gate_and_up_in_4_bits_fit_registers(dtype: torch.dtype, group: int, block: int) -> None:
    x, weight = torch.empty(8, 4096, dtype=dtype, device="meta"), weight_of(4, group, 28672)
    assert block == float_launch(GATE_UP, x, weight).loop.BLOCK_N
    assert float_launch(GATE_UP, x, weight, {"BLOCK_N": 128}).loop.BLOCK_N == 128  # as it is asked


def test_tiles_fit_a_gpu_with_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, cpu = product_tiles.WeightShape(28672, 4096), torch.device("cpu")
    assert product_tiles.small_tiles(8, wide, 2, cpu)["BLOCK_N"] == 128
    monkeypatch.setattr(product_tiles, "shared_bytes", lambda device: 99 << 10)
    assert product_tiles.small_tiles(8, wide, 2, cpu)["BLOCK_N"] == 64


def test_every_table_ends_in_a_choice_for_any_size() -> None:
    for lines in TABLES.values():
        most = lines[-1].rows
        assert all(line.size == 0 for line in [line for line in lines if line.rows == most][-1:])
        assert len({tuple(line.tiles) for line in lines}) == 1
