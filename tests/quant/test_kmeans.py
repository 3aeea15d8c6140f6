"""K-means that looks at few points, against one that looks at all of them, a start at a time."""

from __future__ import annotations

import pytest
import torch

from ingot.quant.methods.kmeans import kmeans

KINDS = ("loud", "even", "few values", "equal", "flat", "far off")


def points(kind: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest and lowest values of channels, as calibration gives them: of fp32."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=generator)
    even = torch.rand(2, count, generator=generator)
    high, low = {
        "loud": (spread.exp(), -(spread * 0.9).exp()),
        "even": (even[0], -even[1]),
        "few values": ((even[0] * 3).floor(), -(even[1] * 3).floor()),
        "equal": (torch.full((count,), 0.5), torch.full((count,), -0.5)),
        "flat": (1e6 * spread.abs(), -0.2 - 1e-3 * even[0]),
        "far off": (1e4 + even[0], 1e4 - even[1]),
    }[kind]
    return high.double(), low.double()


def plain(x: torch.Tensor, y: torch.Tensor, clusters: int) -> torch.Tensor:
    """Labels of one set: ten starts by ``torch.multinomial``, and every distance in every round."""
    both = torch.stack([x, y], dim=1)
    generator = torch.Generator().manual_seed(0)
    best, least = torch.zeros(len(x), dtype=torch.int64), float("inf")
    for _ in range(10):
        chosen = [int(torch.randint(len(x), (1,), generator=generator))]
        distance = (both - both[chosen[0]]).square().sum(1)
        while len(chosen) < clusters:
            weights = distance if bool(distance.sum() > 0) else torch.ones_like(distance)
            chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
            distance = torch.minimum(distance, (both - both[chosen[-1]]).square().sum(1))
        labels, inertia = lloyd(both, both[chosen])
        if inertia < least * (1 - 1e-12):
            best, least = labels, inertia
    return best


def lloyd(both: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, float]:
    labels = torch.full((len(both),), -1)
    for _ in range(100):
        nearest = (both[:, None] - centres).square().sum(-1).argmin(1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        counts = torch.bincount(labels, minlength=len(centres))
        means = torch.zeros_like(centres).index_add_(0, labels, both) / counts.clamp(min=1)[:, None]
        centres = torch.where((counts > 0)[:, None], means, centres)
    return labels, float((both - centres[labels]).square().sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "clusters"), [(1, 1), (7, 7), (128, 8), (700, 5)])
def test_labels_are_those_of_looking_at_all(kind: str, count: int, clusters: int) -> None:
    x, y = points(kind, count, seed=count)
    assert torch.equal(kmeans(x[None], y[None], clusters)[0], plain(x, y, clusters))


@pytest.mark.slow
def test_rounds_end_unfinished_too() -> None:
    """One of these starts still moves after a hundred rounds."""
    x, y = points("loud", 4096, seed=1)
    assert torch.equal(kmeans(x[None], y[None], 24)[0], plain(x, y, 24))


def test_sets_are_on_their_own() -> None:
    sets = [points(kind, 96, seed) for seed, kind in enumerate(KINDS)]
    x, y = (torch.stack(part) for part in zip(*sets, strict=True))
    found = kmeans(x, y, 8)
    for labels, own in zip(found, sets, strict=True):
        assert torch.equal(labels, plain(*own, 8))
