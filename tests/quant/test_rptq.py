"""RPTQ's orders, steps and numbers: against the paper's code, and by their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import BuildError, ConfigError
from ingot.quant.gptq import gptq
from ingot.quant.plain_rows import rounded_blocks
from ingot.quant.rounding import dequantize
from ingot.quant.rptq import (
    block_lengths,
    block_ranges,
    channel_order,
    cluster_channels,
    narrowed,
    order_by_heads,
    scales_of,
    two_levels,
)
from ingot.quant.values import InBlocks
from tests.quant.inputs import inputs, weights


@pytest.fixture(scope="module")
def given(golden: Path) -> dict[str, torch.Tensor]:
    with np.load(golden / "quant" / "rptq.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def told(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "quant" / "rptq.json").read_text())


def inertia(points: torch.Tensor, labels: torch.Tensor) -> float:
    found = [points[labels == label] for label in labels.unique()]
    return float(sum((own - own.mean(0)).square().sum() for own in found))


def points_of(given: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return torch.stack([given[f"{name}_max"], given[f"{name}_min"]], 1).double()


class TestClusters:
    def test_separated_channels_form_the_paper_s_clusters(self, given: dict[str, torch.Tensor]) -> None:
        found = cluster_channels(given["sep_min"], given["sep_max"], 8)
        own = given["sep_n8_cluster_of_channel"]
        assert torch.equal(found[:, None] == found, own[:, None] == own)
        counts = torch.bincount(found).tolist()
        assert sorted(counts) == sorted(given["sep_n8_counts"].tolist())

    @pytest.mark.parametrize(("name", "clusters"), [("sep", 8), ("cont", 4), ("cont", 8)])
    def test_they_are_as_tight(
        self, given: dict[str, torch.Tensor], told: dict[str, Any], name: str, clusters: int
    ) -> None:
        found = cluster_channels(given[f"{name}_min"], given[f"{name}_max"], clusters)
        assert inertia(points_of(given, name), found) <= told[f"{name}_n{clusters}_kmeans_inertia"] * 1.01
        assert len(found.unique()) == clusters

    def test_those_of_heads_are_as_tight(self, given: dict[str, torch.Tensor], told: dict[str, Any]) -> None:
        size = len(given["head_max"]) // 4
        total = 0.0
        for head in range(4):
            own = slice(head * size, (head + 1) * size)
            found = cluster_channels(given["head_min"][own], given["head_max"][own], 3)
            total += inertia(points_of(given, "head")[own], found)
        paper = given["head_n3_h4_cluster_of_channel"]
        points = points_of(given, "head")
        assert total <= inertia(points, paper) * 1.01
        assert total <= told["head_n3_h4_kmeans_inertia"] * 1.01

    def test_louder_ones_come_later(self, given: dict[str, torch.Tensor]) -> None:
        low, high = given["cont_min"], given["cont_max"]
        found = cluster_channels(low, high, 4)
        means = [float((high - low)[found == label].mean()) for label in range(4)]
        assert means == sorted(means)

    def test_odd_counts(self) -> None:
        low, high = -torch.ones(5), torch.ones(5)
        assert cluster_channels(low, high, 8).shape == (5,)
        assert cluster_channels(low, high, 1).tolist() == [0] * 5
        with pytest.raises(ConfigError, match="at least one"):
            cluster_channels(low, high, 0)
        with pytest.raises(BuildError, match="finite"):
            cluster_channels(low, torch.full((5,), torch.inf), 2)
        with pytest.raises(ConfigError, match="lowest and a highest"):
            cluster_channels(low, high[:4], 2)


class TestOrder:
    def test_it_is_clusters_then_ranges(self, given: dict[str, torch.Tensor]) -> None:
        low, high = given["sep_min"], given["sep_max"]
        order = channel_order(low, high, 8)
        assert order.sort().values.tolist() == list(range(160))
        own = cluster_channels(low, high, 8)[order]
        assert bool((own.diff() >= 0).all())
        span = (high - low)[order]
        assert bool((span.diff()[own.diff() == 0] >= 0).all())
        paper = given["sep_n8_cluster_of_channel"][order]
        assert int((paper.diff() != 0).sum()) == 7  # the paper's clusters are contiguous in it

    def test_within_heads_that_share_values(self) -> None:
        """Two heads of values, each read by three of queries: one order for the three."""
        generator = torch.Generator().manual_seed(5)
        high = torch.rand(2 * 3 * 16, generator=generator)
        rows, channels = order_by_heads(-high, high, heads=2, shared=3)
        loudest = high.view(2, 3, 16).amax(1)
        for head in range(2):
            own = rows[head * 16 : (head + 1) * 16] - head * 16
            assert torch.equal(own, channel_order(-loudest[head], loudest[head]))
            for copy in range(3):
                start = (head * 3 + copy) * 16
                assert torch.equal(channels[start : start + 16] - start, own)


class TestSteps:
    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize(("name", "clusters"), [("sep", 8), ("cont", 4)])
    def test_they_are_the_paper_s(
        self, given: dict[str, torch.Tensor], name: str, clusters: int, bits: int
    ) -> None:
        """Its order and clusters, steps and zeros of two batches, and a third one in these numbers."""
        order, counts = given[f"{name}_n{clusters}_index"], given[f"{name}_n{clusters}_counts"]
        seen = torch.cat([given[f"{name}_x0"], given[f"{name}_x1"]]).flatten(0, 1)[:, order]
        low, high = block_ranges(seen.amin(0), seen.amax(0), counts.tolist())
        steps, zeros = (part.repeat_interleave(counts) for part in scales_of(low, high, bits))
        told = f"{name}_b{bits}_minmax_"
        torch.testing.assert_close(steps, given[told + "scale"], rtol=1e-6, atol=0)
        assert torch.equal(zeros, given[told + "zero"])
        near = rounded_blocks(given[f"{name}_x2"][0][:, order], steps, zeros, 1, bits)
        torch.testing.assert_close(near, given[told + "y"][0], rtol=1e-5, atol=1e-5)

    def test_a_range_without_width(self) -> None:
        """A channel that never moves is one number and a step that keeps its zero within bounds."""
        steps, zeros = scales_of(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 5.0]), 8)
        assert float(zeros.abs().max()) <= 2**16
        near = rounded_blocks(torch.tensor([[0.0, 5.0]]), steps, zeros, 1, 8)
        torch.testing.assert_close(near, torch.tensor([[0.0, 5.0]]), rtol=1e-4, atol=1e-9)

    def test_in_4_bits_rare_values_are_cut(self) -> None:
        """One value in a thousand is 20 times as large, in the second of two blocks."""
        x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(2))
        x[5, 40], x[6, 50] = 20.0, -20.0
        low, high = block_ranges(x.amin(0), x.amax(0), [32, 32])
        cut = narrowed(low, high, x, 32, 4, torch.ones(64))
        assert float(cut[1][1]) < 8
        assert float(cut[1][0]) > 0.6 * float(high[0])

        def error(low: torch.Tensor, high: torch.Tensor) -> float:
            return float((rounded_blocks(x, *scales_of(low, high, 4), 32, 4) - x).square().sum())

        assert error(*cut) < 0.3 * error(low, high)
        x[:, 40] = 0
        x[5, 40] = 20.0
        weighed = torch.ones(64)
        weighed[40] = 1e4  # that column is nearly all of the outputs
        assert float(narrowed(low, high, x, 32, 4, weighed)[1][1]) > 15

    def test_lengths(self) -> None:
        assert block_lengths(160, 64) == [64, 64, 32]
        assert block_lengths(128, 64) == [64, 64]


class TestTwoLevels:
    def test_numbers_of_8_bits_mean_the_same(self) -> None:
        weight, x = weights(24, 200, seed=2), inputs(400, 200, seed=2)
        weight[3] = 0
        weight[:, 64:128] *= 0.2
        hessian = x.T @ x / len(x)
        found = two_levels(weight, 64, hessian.diagonal())
        assert int(found.factors.abs().max()) == 15
        numbers = gptq(weight, hessian, 4, 64, grid=found.grid, act_order=True, scale_dtype=torch.float32)
        wide = found.wide_values(numbers.quantized.values, 64)
        assert wide.dtype == torch.int8
        meant = wide.float() * found.rows[:, None]
        torch.testing.assert_close(meant, dequantize(numbers.quantized), rtol=1e-6, atol=1e-9)
        assert len(wide[:, :64].unique()) > 16  # factors differ from row to row
        assert all(len(wide[n, :64].unique()) <= 16 for n in range(24))
        error = float((weight - meant).norm() / weight.norm())
        assert error < 0.2

    def test_the_second_level_costs_little(self) -> None:
        """Whole factors lose less than a tenth beside steps of any size."""
        weight = weights(64, 256, seed=4)
        plain = torch.ones(256)
        found = two_levels(weight, 64, plain)
        from ingot.quant.rounding import best_grid, in_groups

        blocks = in_groups(weight, 64)
        free = best_grid(blocks, 4, True, torch.float32, tuple(1 - s / 40 for s in range(21)))
        errors = [float((g.meant(g.nearest(blocks)) - blocks).norm()) for g in (found.grid, free)]
        assert errors[0] < 1.1 * errors[1]


def test_the_shift_is_what_zeros_take() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-127, 128, (7, 40), generator=generator, dtype=torch.int8)
    steps, zeros = torch.rand(3, generator=generator), torch.tensor([3.0, -100.0, 7.0])
    layer = InBlocks(numbers, torch.rand(7, generator=generator), steps, zeros)
    each = steps.repeat_interleave(16)[:40], zeros.repeat_interleave(16)[:40]
    q = torch.randint(-128, 128, (5, 40), generator=generator).double()
    wide = numbers.double() * layer.scales.double()[:, None]
    exact = ((q - each[1]) * each[0]) @ wide.T
    torch.testing.assert_close((q * each[0]) @ wide.T + layer.shift(16), exact)
