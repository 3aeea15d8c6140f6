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
from ingot.kernels.tiles.tile_tables import TABLES, chosen, listed
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
    assert chosen("dense", 9, 65535) == chosen("dense", 16, 16384) != chosen("dense", 16, 65536)
    copied = chosen("packed_8_bits", 64, 22016, lambda tiles: not tiles["DIRECT"])
    assert (copied["BLOCK_N"], copied["AHEAD"], copied["DIRECT"]) == (64, 2, 0)
    assert [tiles["BLOCK_N"] for tiles in listed("try_dense", 8)] == [64, 32, 64, 64]
    assert listed("try_dense", 32) == listed("try_dense", 64)


def test_every_table_ends_in_a_choice_for_any_size() -> None:
    for lines in TABLES.values():
        most = lines[-1].rows
        assert all(line.size == 0 for line in [line for line in lines if line.rows == most][-1:])
        assert len({tuple(line.tiles) for line in lines}) == 1
