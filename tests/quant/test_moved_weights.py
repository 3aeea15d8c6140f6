"""Values that GPTQ chose may end anywhere on their grids; rows that are others' are found all the same."""

from __future__ import annotations

import pytest
import torch

from ingot.building.source.plain_readings import reading_of
from ingot.building.source.rounding_limits import clipped
from ingot.quant.methods.gptq import gptq
from ingot.quant.methods.moved_weights import Moves
from ingot.quant.methods.rounding import dequantize
from ingot.quant.schemes.plain_unpacking import PlainGrid, in_groups
from ingot.quant.schemes.weight_only import WeightOnly

ROWS, COLUMNS, GROUP, TOKENS = 96, 128, 32, 40
MOVES = Moves(chosen=True, least=2**-11)
SCHEME = WeightOnly(4, GROUP, symmetric=True)
RULE = reading_of(SCHEME).rule(SCHEME, "gptq", torch.float16)


def chosen(weight: torch.Tensor, group: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What GPTQ's values mean, and their scales; few tokens, so that columns make up for much."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS, generator=generator)]
    x = torch.randn(TOKENS, COLUMNS, generator=generator) * loud
    found = gptq(weight, x.T @ x / TOKENS, 4, group, act_order=True, static_groups=True).quantized
    return dequantize(found), torch.atleast_2d(found.scales).T.float().abs()


def grid_of(meant: torch.Tensor, scales: torch.Tensor) -> PlainGrid:
    blocks = in_groups(meant, meant.shape[1] // scales.shape[1])
    return PlainGrid(blocks, scales, -8 * scales, 8 * scales)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000 + seed))


def wrong_rows(weight: torch.Tensor, got: torch.Tensor, ends: torch.Tensor | None) -> list[int]:
    limit = MOVES.limit(float(MOVES.by_row(weight, got, ends).median()))
    return MOVES.wrong(weight, got, limit, ends).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("group", [GROUP, 0])
@pytest.mark.parametrize("outliers", ["none", "of a row", "of most rows"])
def test_sound_weights_pass(group: int, outliers: str) -> None:
    for seed in range(8):
        weight = normal(seed)
        if outliers != "none":
            rows = slice(7, 8) if outliers == "of a row" else slice(0, ROWS - 3)
            weight[rows, 5] *= 30
        got, scales = chosen(weight, group, seed)
        blocks = in_groups(weight, COLUMNS // scales.shape[1])
        ends = clipped(grid_of(got, scales), blocks, RULE).flatten(1)
        assert wrong_rows(weight, got, ends) == []


@pytest.mark.parametrize("part", [1.0, 0.5, 0.25])
def test_a_row_or_a_part_of_one_that_is_anothers_is_found(part: float) -> None:
    for seed in range(8):
        weight = normal(seed)
        got, scales = chosen(weight, GROUP, seed)
        columns = int(part * COLUMNS)
        got[9, :columns], scales[9, : columns // GROUP] = got[10, :columns], scales[10, : columns // GROUP]
        ends = clipped(grid_of(got, scales), in_groups(weight, GROUP), RULE).flatten(1)
        assert wrong_rows(weight, got, ends) == [9]


def test_a_value_at_an_end_has_moved_by_the_length_of_its_grid_at_most() -> None:
    weight = torch.tensor([[-0.9, 0.3, 0.9, -8.0], [-0.9, 0.3, 0.9, -20.0]])[:, None]
    scales = torch.ones(2, 1)
    meant = torch.tensor([[8.0, 8.0, 7.0, 8.0], [8.0, 8.0, 5.0, 8.0]])[:, None]
    found = clipped(PlainGrid(meant, scales, -8 * scales, 8 * scales), weight, RULE)
    assert found[:, 0].tolist() == [[True, True, False, True], [True, True, False, False]]


def test_a_value_within_its_grid_has_the_room_of_its_row() -> None:
    """Where all values of a row move farther, one may be beyond the limit of other rows."""
    generator = torch.Generator().manual_seed(5)
    weight = normal(5)
    got = weight + 0.25 * torch.rand(weight.shape, generator=generator) * weight.abs().amax(1, keepdim=True)
    far = 0.62 * float(weight[4].abs().max())
    got[4, 3] = weight[4, 3] + far
    assert wrong_rows(weight, got, None) == [4]
    got[4] = weight[4] + 2 * (got[4] - weight[4])
    got[4, 3] = weight[4, 3] + far
    assert wrong_rows(weight, got, None) == []


def test_a_value_that_is_cut_may_be_far_from_its_weight() -> None:
    weight = normal(3)
    got, scales = chosen(weight, GROUP, 3)
    far = int(weight[4, :GROUP].argmin())
    got[4, far] = 8 * scales[4, 0]
    ends = clipped(grid_of(got, scales), in_groups(weight, GROUP), RULE).flatten(1)
    assert wrong_rows(weight, got, ends) == []
    ends[4, far] = False
    assert wrong_rows(weight, got, ends) == [4]


def test_a_row_that_is_anothers_does_not_excuse_itself_by_how_far_it_moves() -> None:
    """By the wider limit of RPTQ, where rows have the most room."""
    moves = Moves(chosen=True, least=2**-11, farther=2 / 15)
    for seed in range(20):
        weight = normal(seed)
        noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        got = weight + 0.18 * noise * weight.abs().amax(1, keepdim=True)
        got[9] += weight[10] - weight[9]
        limit = moves.limit(float(moves.by_row(weight, got).median()))
        assert moves.wrong(weight, got, limit).any(1).nonzero().flatten().tolist() == [9]


def test_a_column_that_makes_up_for_others_in_all_rows_is_its_own_measure() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = normal(6)
    largest = weight.abs().amax(1, keepdim=True)
    got = weight + 0.1 * (2 * torch.rand(weight.shape, generator=generator) - 1) * largest
    got[:, 7] = weight[:, 7] + 0.7 * largest[:, 0] * torch.sign(torch.randn(ROWS, generator=generator))
    assert wrong_rows(weight, got, None) == []
