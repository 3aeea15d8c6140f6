"""RPTQ's orders: channels of like ranges beside each other, in clusters that fill whole blocks.

Source: Yuan et al., "RPTQ" (arXiv 2304.01089): k-means of channels by (max, min), and an order in which
clusters are contiguous. Its clusters have any size. An integer product takes one scale for a block of
columns, so here every cluster has whole blocks: k-means gives the centres, each centre gets the number of
blocks nearest to its size (none where it is far smaller than one), and channels go to their nearest centre
while it has room, those first that would lose most elsewhere. Clusters are in order of their ranges, and so
are the channels of one: a few outliers end the last cluster.

Where whole blocks tear clusters apart, plain order by range can be better. Both orders are given, and the
build takes the one whose outputs are nearer on a sample. (Padding clusters to whole blocks instead would cost
up to a block of zeros for each in every product.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.errors import BuildError, ConfigError
from ingot.quant.methods.kmeans import kmeans

CLUSTERS = 32


def cluster_channels(lowest: torch.Tensor, highest: torch.Tensor, clusters: int) -> torch.Tensor:
    """The cluster of each channel, int64 [K], by k-means of (highest, lowest); the same again every time.

    Clusters are numbered by their mean range, the smallest first. There are never more than channels. Raises
    BuildError where a range is not finite.
    """
    if clusters < 1:
        raise ConfigError("there must be at least one cluster", seen=clusters)
    if lowest.shape != highest.shape or lowest.dim() != 1:
        seen = [list(lowest.shape), list(highest.shape)]
        raise ConfigError("every channel needs a lowest and a highest value", seen=seen)
    low, high = _finite(lowest), _finite(highest)
    found = kmeans(high[None], low[None], min(clusters, len(low)))[0]
    sums = low.new_zeros(int(found.max()) + 1).scatter_add_(0, found, high - low)
    means = sums / torch.bincount(found).clamp(min=1)
    return means.argsort(stable=True).argsort()[found].to(lowest.device)


def whole_clusters(
    lowest: torch.Tensor, highest: torch.Tensor, lengths: Sequence[int], clusters: int
) -> torch.Tensor:
    """The cluster of each channel, int64 [K], each as large as a run of blocks with these lengths."""
    count = min(clusters, len(lengths))
    if count == 1:
        return torch.zeros(len(lowest), dtype=torch.int64, device=lowest.device)
    found = cluster_channels(lowest, highest, count).cpu()
    points = torch.stack([_finite(highest), _finite(lowest)], 1)  # [K, 2]
    sizes = torch.bincount(found)
    kept = sizes.nonzero()[:, 0]  # k-means may leave some empty
    centres = torch.stack([points[found == label].mean(0) for label in kept.tolist()])
    return _filled(points, centres, _rooms(sizes[kept].tolist(), lengths)).to(lowest.device)


def channel_orders(
    lowest: torch.Tensor, highest: torch.Tensor, block: int, clusters: int = CLUSTERS
) -> list[torch.Tensor]:
    """Orders to choose from, int64 [K]: channel ``order[j]`` comes to place j. In the first one blocks are of
    one cluster each, in order of their ranges; in the second channels are in order of their ranges.
    """
    found = whole_clusters(lowest, highest, block_lengths(len(lowest), block), clusters)
    by_range = (highest - lowest).argsort(stable=True)
    return [by_range[found[by_range].argsort(stable=True)], by_range]


def orders_by_heads(
    lowest: torch.Tensor,
    highest: torch.Tensor,
    heads: int,
    shared: int = 1,
    *,
    block: int,
    clusters: int = CLUSTERS,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same within heads, for inputs [heads · shared · d] of an output product.

    ``heads`` heads of values are read by ``shared`` neighbouring heads of queries each, whose channels have
    to keep one order. Where blocks do not divide a head, its channels are in order of their ranges. Of each
    order: int64 [heads · d], that of the values' rows, and int64 [K], that of the input's channels.
    """
    low = lowest.unflatten(0, (heads, shared, -1)).amin(1)  # [heads, d]
    high = highest.unflatten(0, (heads, shared, -1)).amax(1)
    size = low.shape[1]
    most = clusters if size % block == 0 else 1
    each = [channel_orders(*pair, min(block, size), most) for pair in zip(low, high, strict=True)]
    firsts = torch.arange(heads, device=low.device)[:, None] * size
    starts = torch.arange(heads * shared, device=low.device)[:, None] * size
    within = (torch.stack(own) for own in zip(*each, strict=True))
    return [((w + firsts).flatten(), (w.repeat_interleave(shared, dim=0) + starts).flatten()) for w in within]


def block_lengths(columns: int, block: int) -> list[int]:
    """Columns of each block, the last one maybe shorter."""
    return [min(block, columns - start) for start in range(0, columns, block)]


def block_ranges(
    lowest: torch.Tensor, highest: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest, highest) [blocks] of channels [K] in blocks of these lengths."""
    low = [part.amin() for part in lowest.split(list(lengths))]
    high = [part.amax() for part in highest.split(list(lengths))]
    return torch.stack(low), torch.stack(high)


def _rooms(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Channels that each cluster takes: runs of blocks, nearest to their sizes; none of a small one."""
    want = [size / lengths[0] for size in sizes]
    blocks = [int(share) for share in want]
    by_rest = sorted(range(len(sizes)), key=lambda i: blocks[i] - want[i])  # those that lack most
    for i in by_rest[: len(lengths) - sum(blocks)]:
        blocks[i] += 1
    ends = [sum(blocks[: i + 1]) for i in range(len(blocks))]
    return [sum(lengths[end - count : end]) for end, count in zip(ends, blocks, strict=True)]


def _filled(points: torch.Tensor, centres: torch.Tensor, rooms: Sequence[int]) -> torch.Tensor:
    """The nearest centre that has room for each point; those that would lose most elsewhere choose first."""
    squares = (points[:, None] - centres).square().sum(-1)  # [K, clusters]
    near = squares.sort(dim=1, stable=True)
    loss = near.values[:, min(1, len(rooms) - 1)] - near.values[:, 0]
    left, labels = list(rooms), torch.empty(len(points), dtype=torch.int64)
    choices = near.indices.tolist()
    for point in loss.argsort(descending=True, stable=True).tolist():
        label = next(one for one in choices[point] if left[one])
        left[label] -= 1
        labels[point] = label
    return labels


def _finite(values: torch.Tensor) -> torch.Tensor:
    """In fp64 on the CPU."""
    wide = values.double().cpu()
    if not bool(torch.isfinite(wide).all()):
        raise BuildError("activations are not finite during calibration, or there were none", fix="`calib`")
    return wide
