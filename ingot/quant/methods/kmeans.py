"""K-means of points in a plane, for many sets of points at once.

Ten starts per set, each of centres drawn by k-means++, and the one whose points lie closest to their centres,
the same again every time: a set's labels are those that it has alone. Draws are those of a generator with
seed 0 for each set, so that sets of one size share them.

A round looks only at points whose nearest centre may have changed: a point knows how much farther its
second centre was, and centres how far they moved since (Hamerly, "Making k-means even faster", 2010). Which
centre is nearest is always decided by squared distances in fp64, so labels are those of looking at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_STARTS, _ROUNDS = 10, 100  # attempts of a set, and most rounds of one
_DOUBT = 1e-9  # of the largest coordinate: distances whose roundings may decide which is less


def kmeans(x: torch.Tensor, y: torch.Tensor, clusters: int) -> torch.Tensor:
    """The cluster of each point, int64 [sets, points], of coordinates in fp64 on the CPU, finite ones.

    ``clusters`` is at most the number of points; one may stay empty where points are the same.
    """
    centres = _seeds(x, y, clusters)  # [sets, starts, clusters, 2]
    sets, points = x.shape
    across, along = (part[:, None].expand(-1, _STARTS, -1).flatten(0, 1).contiguous() for part in (x, y))
    labels, centres = _lloyd(across, along, centres.flatten(0, 1))
    pairs, labels = torch.stack([x, y], dim=-1), labels.view(sets, _STARTS, points)
    centres = centres.view(sets, _STARTS, clusters, 2)
    best = torch.zeros_like(labels[:, 0])
    for own, tries, found, kept in zip(pairs, labels, centres, best, strict=True):
        least = float("inf")
        for labelled, means in zip(tries, found, strict=True):
            inertia = float((own - means[labelled]).square().sum())
            if inertia < least * (1 - 1e-12):
                least = inertia
                kept.copy_(labelled)
    return best


def _seeds(x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    """k-means++: each next centre is a point drawn by its squared distance to those before.

    ``torch.multinomial`` of one draw is the point of largest weight over a draw of an exponential
    distribution; those draws are the same for every set.
    """
    sets, points = x.shape
    generator = torch.Generator().manual_seed(0)
    firsts, draws = [], torch.empty(_STARTS, count - 1, points, dtype=x.dtype)
    for own in draws:
        firsts.append(int(torch.randint(points, (1,), generator=generator)))
        for draw in own:
            draw.exponential_(generator=generator)
    chosen = torch.empty(sets, _STARTS, count, dtype=torch.int64)
    chosen[:, :, 0] = torch.tensor(firsts)
    x, y = (part[:, None].expand(-1, _STARTS, -1) for part in (x, y))
    distance = _squares(x, y, chosen[:, :, :1])
    for place in range(1, count):
        weights = torch.where((distance > 0).any(-1, keepdim=True), distance, 1.0)
        chosen[:, :, place] = (weights / draws[:, place - 1]).argmax(-1)
        if place + 1 < count:
            distance = torch.minimum(distance, _squares(x, y, chosen[:, :, place : place + 1]))
    return torch.stack([x.gather(-1, chosen), y.gather(-1, chosen)], dim=-1)


def _squares(x: torch.Tensor, y: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Squared distances [sets, starts, points] to the point with the index ``to`` [sets, starts, 1]."""
    across, along = x - x.gather(-1, to), y - y.gather(-1, to)
    return across.mul_(across).add_(along.mul_(along))


@dataclass
class _Running:
    """Starts that still move, ``rows`` of all.

    Attributes:
        x, y: [n, points].
        labels: int64 [n, points], -1 before the first round.
        gap: [n, points], at least as much as a point's second centre is farther than its own, if positive.
        centres: [n, clusters, 2].
    """

    rows: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    labels: torch.Tensor
    gap: torch.Tensor
    centres: torch.Tensor

    def look(self, doubt: torch.Tensor) -> torch.Tensor:
        """Give points in doubt their nearest centres; returns bool [n]: whether some have another."""
        places = (self.gap.view(-1) <= doubt.expand_as(self.gap).reshape(-1)).nonzero()[:, 0]
        own = places // self.gap.shape[1]
        x, y = (part.view(-1)[places] for part in (self.x, self.y))
        cx, cy = (part.contiguous() for part in self.centres.unbind(-1))
        across, along = x[:, None] - cx[own], y[:, None] - cy[own]
        distances = across.mul_(across).add_(along.mul_(along))  # [points in doubt, clusters]
        least, nearest = distances.min(1)
        second = distances.scatter_(1, nearest[:, None], torch.inf).amin(1)
        self.gap.view(-1)[places] = second.sqrt_() - least.sqrt_()
        labels = self.labels.view(-1)
        other = labels[places] != nearest
        labels[places] = nearest
        return torch.zeros(len(self.rows), dtype=torch.bool).index_fill_(0, own[other], True)

    def move(self) -> None:
        """Centres to the means of their points; one without points stays."""
        count, clusters = self.centres.shape[:2]
        bins = (self.labels + torch.arange(count)[:, None] * clusters).view(-1)
        many = torch.bincount(bins, minlength=count * clusters)
        sums = [torch.bincount(bins, part.view(-1), minlength=count * clusters) for part in (self.x, self.y)]
        means = torch.stack(sums, dim=-1) / many.clamp(min=1)[:, None]
        means = torch.where((many > 0)[:, None], means, self.centres.flatten(0, 1)).view_as(self.centres)
        moved = (means - self.centres).square().sum(-1).sqrt()  # [n, clusters]
        self.centres = means
        self.gap -= moved.amax(1, keepdim=True)
        self.gap -= moved.view(-1)[bins].view_as(self.gap)

    def only(self, kept: torch.Tensor) -> _Running:
        parts = (self.rows, self.x, self.y, self.labels, self.gap, self.centres)
        return _Running(*(part[kept] for part in parts))


def _lloyd(x: torch.Tensor, y: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels int64 [starts, points] and centres, of each start once none of its points moves."""
    everywhere = torch.arange(len(x))
    running = _Running(everywhere, x, y, torch.full_like(x, -1, dtype=torch.int64), x - torch.inf, centres)
    labels, last = torch.empty_like(running.labels), torch.empty_like(centres)
    doubt = torch.maximum(x.abs().amax(1), y.abs().amax(1))[:, None] * _DOUBT
    for _ in range(_ROUNDS):
        moves = running.look(doubt[running.rows])
        ended = running.rows[~moves]
        labels[ended], last[ended] = running.labels[~moves], running.centres[~moves]
        if len(ended):
            running = running.only(moves)
        if not len(running.rows):
            return labels, last
        running.move()
    labels[running.rows], last[running.rows] = running.labels, running.centres
    return labels, last
