"""RPTQ's orders, steps and numbers: against the paper's code, and by their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import BuildError, ConfigError
from ingot.quant.methods.channel_clusters import (
    block_lengths,
    block_ranges,
    channel_orders,
    cluster_channels,
    orders_by_heads,
    whole_clusters,
)
from ingot.quant.methods.gptq import gptq
from ingot.quant.methods.rounding import dequantize
from ingot.quant.methods.rptq import averaged_ranges, narrowed, scales_of, two_levels
from ingot.quant.plain_rows import rounded_blocks
from ingot.quant.quantized_values import InBlocks
from tests.quant.inputs import inputs, weights


@pytest.fixture(scope="module")
def given(golden: Path) -> dict[str, torch.Tensor]:
    with np.load(golden / "quant" / "rptq.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def reported(golden: Path) -> dict[str, Any]:
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
        self, given: dict[str, torch.Tensor], reported: dict[str, Any], name: str, clusters: int
    ) -> None:
        found = cluster_channels(given[f"{name}_min"], given[f"{name}_max"], clusters)
        assert inertia(points_of(given, name), found) <= reported[f"{name}_n{clusters}_kmeans_inertia"] * 1.01
        assert len(found.unique()) == clusters

    def test_those_of_heads_are_as_tight(
        self, given: dict[str, torch.Tensor], reported: dict[str, Any]
    ) -> None:
        size = len(given["head_max"]) // 4
        total = 0.0
        for head in range(4):
            own = slice(head * size, (head + 1) * size)
            found = cluster_channels(given["head_min"][own], given["head_max"][own], 3)
            total += inertia(points_of(given, "head")[own], found)
        paper = given["head_n3_h4_cluster_of_channel"]
        points = points_of(given, "head")
        assert total <= inertia(points, paper) * 1.01
        assert total <= reported["head_n3_h4_kmeans_inertia"] * 1.01

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


class TestWholeClusters:
    def grouped(self, sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranges of channels in groups far apart, in any order."""
        generator = torch.Generator().manual_seed(seed)
        group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        group = group[torch.randperm(len(group), generator=generator)]
        noise = torch.rand(2, len(group), generator=generator) * 0.1
        return -(4.0**group) + noise[0], 3 * 4.0**group + noise[1]

    def test_clusters_of_whole_blocks_stay_as_they_are(self) -> None:
        low, high = self.grouped([32, 64, 32, 32])
        found = whole_clusters(low, high, block_lengths(160, 32), 4)
        assert torch.equal(found, cluster_channels(low, high, 4))
        assert torch.bincount(found).tolist() == [32, 64, 32, 32]

    @pytest.mark.parametrize(
        ("sizes", "clusters", "expected"),
        [
            ([40, 70, 20, 30], 4, [32, 64, 32, 32]),
            ([64, 60, 30, 6], 4, [64, 64, 32]),  # a few outliers have no block of their own
            ([100, 50], 2, [96, 54]),  # the loudest has the short block
            ([20, 40], 4, [32, 28]),  # no more than blocks
            ([70, 20, 30, 40], 1, [160]),
        ],
    )
    def test_each_has_whole_blocks(self, sizes: list[int], clusters: int, expected: list[int]) -> None:
        low, high = self.grouped(sizes)
        found = whole_clusters(low, high, block_lengths(sum(sizes), 32), clusters)
        assert torch.bincount(found).tolist() == expected

    def test_who_would_lose_most_stays(self) -> None:
        """Of 34 channels about one centre, the two that are nearest to the other's go there."""
        for ends, moved in (((1, 1.5), [32, 33]), ((1.5, 1), [0, 1])):
            low = torch.cat([-torch.linspace(*ends, 34), torch.full((30,), -9.0)])
            found = whole_clusters(low, -low, block_lengths(64, 32), 2)
            assert found[:34].nonzero()[:, 0].tolist() == moved

    def test_channels_alike(self) -> None:
        """K-means leaves clusters empty where points are the same."""
        found = whole_clusters(-torch.ones(96), torch.ones(96), block_lengths(96, 32), 3)
        assert len(found) == 96
        for order in channel_orders(-torch.ones(96), torch.ones(96), 32):
            assert order.sort().values.tolist() == list(range(96))


class TestOrder:
    @pytest.mark.parametrize("name", ["sep", "cont"])
    @pytest.mark.parametrize("block", [16, 32, 64])
    def test_blocks_are_of_one_cluster(self, given: dict[str, torch.Tensor], name: str, block: int) -> None:
        """And within one, as in the other order, channels are by range."""
        low, high = given[f"{name}_min"], given[f"{name}_max"]
        lengths, span = block_lengths(160, block), high - low
        found = whole_clusters(low, high, lengths, 8)
        order, by_range = channel_orders(low, high, block, 8)
        assert order.sort().values.tolist() == list(range(160))
        assert all(len(own.unique()) == 1 for own in found[order].split(lengths))
        assert bool((span[order].diff()[found[order].diff() == 0] >= 0).all())
        assert bool((span[by_range].diff() >= 0).all())

    def test_channels_of_one_side_are_not_mixed(self) -> None:
        """Ranges [0, 8] and [-8, 0]: as wide, and a block of both is twice as wide."""
        sides = torch.randperm(128, generator=torch.Generator().manual_seed(1)) < 64
        noise = torch.rand(128, generator=torch.Generator().manual_seed(2))
        low, high = -8.0 * sides - noise, 8.0 * ~sides + noise
        order, by_range = channel_orders(low, high, 32)
        assert all(len(own.unique()) == 1 for own in sides[order].split(32))
        assert widths(low, high, order, [32] * 4) < 0.4 * widths(low, high, by_range, [32] * 4)

    @pytest.mark.parametrize(("size", "block"), [(16, 8), (16, 16), (16, 32), (24, 16)])
    def test_within_heads_that_share_values(self, size: int, block: int) -> None:
        """Two heads of values, each read by three of queries: one order for the three."""
        generator = torch.Generator().manual_seed(5)
        high = torch.rand(2 * 3 * size, generator=generator)
        both = orders_by_heads(-high, high, heads=2, shared=3, block=block)
        loudest = high.view(2, 3, size).amax(1)
        for place, (rows, channels) in enumerate(both):
            for head in range(2):
                own = rows[head * size : (head + 1) * size] - head * size
                clusters = 32 if size % block == 0 else 1
                alone = channel_orders(-loudest[head], loudest[head], min(block, size), clusters)
                assert torch.equal(own, alone[place])
                for copy in range(3):
                    start = (head * 3 + copy) * size
                    assert torch.equal(channels[start : start + size] - start, own)

    def test_heads_have_clusters_of_their_own(self) -> None:
        """One side's channels and the other's, in the first of two heads."""
        low = torch.where(torch.arange(32) % 2 == 0, -8.0, 0.0)
        low[16:] = -torch.arange(16.0)
        (rows, _), _ = orders_by_heads(low, low + 8, heads=2, block=8, clusters=2)
        assert all(len(own.unique()) == 1 for own in low[rows[:16]].split(8))
        assert rows[16:].sort().values.tolist() == list(range(16, 32))


def widths(low: torch.Tensor, high: torch.Tensor, order: torch.Tensor, lengths: list[int]) -> float:
    """Squared widths of blocks, of each of their channels."""
    parts = zip(low[order].split(lengths), high[order].split(lengths), strict=True)
    return sum(len(own) * float(peaks.amax() - own.amin()) ** 2 for own, peaks in parts)


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
        reported = f"{name}_b{bits}_minmax_"
        torch.testing.assert_close(steps, given[reported + "scale"], rtol=1e-6, atol=0)
        assert torch.equal(zeros, given[reported + "zero"])
        near = rounded_blocks(given[f"{name}_x2"][0][:, order], steps, zeros, 1, bits)
        torch.testing.assert_close(near, given[reported + "y"][0], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize(("name", "clusters"), [("sep", 8), ("cont", 4)])
    def test_averages_over_records_are_the_paper_s(
        self, given: dict[str, torch.Tensor], name: str, clusters: int, bits: int
    ) -> None:
        order, counts = given[f"{name}_n{clusters}_index"], given[f"{name}_n{clusters}_counts"]
        records = torch.cat([given[f"{name}_x0"], given[f"{name}_x1"]])[:, :, order]
        low, high = averaged_ranges(records.amin(1), records.amax(1), counts.tolist())
        steps, zeros = (part.repeat_interleave(counts) for part in scales_of(low, high, bits))
        reported = f"{name}_b{bits}_ema_minmax_"
        torch.testing.assert_close(steps, given[reported + "scale"], rtol=1e-6, atol=0)
        assert torch.equal(zeros, given[reported + "zero"])

    def test_averages_begin_with_the_first_record(self) -> None:
        """And each next one moves them by a hundredth."""
        high = torch.tensor([[1.0, 2, 8, 4], [3, 1, 0, 20], [5, 5, 0, 0]])
        low, found = averaged_ranges(-2 * high, high, [2, 2])
        peaks = ((2, 3, 5), (8, 20, 0))  # of each block
        expected = [0.99 * (0.99 * first + 0.01 * second) + 0.01 * third for first, second, third in peaks]
        torch.testing.assert_close(found, torch.tensor(expected))
        torch.testing.assert_close(low, -2 * torch.tensor(expected))

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
        from ingot.quant.methods.rounding import best_grid, in_groups

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
