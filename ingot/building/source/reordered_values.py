"""Weights whose channels RPTQ put in another order, where a product makes them and another reads them.

No engine stores these orders. They are derived: a stored channel is the checkpoint's whose rows and columns
it is nearest to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.building.source.folded_values import Stored, by_row
from ingot.building.source.folding_sites import Site, maker_of, site_of
from ingot.building.source.tensor_origin import Known, Origin, Read
from ingot.config.decoder_config import DecoderConfig

_PROBES = 24  # values that stand for a row or a column
_PIECE = 1024  # channels that are compared with all others at once


class Reordered(Origin):
    """Tensors of a model some of whose channels changed places.

    ``takes(reader)``: whether a layer reads its input in an order that it does not store.
    """

    def __init__(
        self,
        read: Read,
        config: DecoderConfig,
        stored: Stored,
        takes: Callable[[str], bool],
        device: torch.device,
    ) -> None:
        super().__init__(read)
        self._config = config
        self._stored = stored
        self._takes = takes
        self._device = device
        self._orders: dict[str, torch.Tensor] = {}

    def leaf(self, module: str, leaf: str) -> Known:
        """Weights with their rows and columns in the stored order, biases with their rows."""
        tensor = self.read(module, leaf)
        reader = maker_of(self._config, module)
        if reader is not None and reader.size and self._takes(reader.reader):
            tensor = tensor[self._rows(reader, len(tensor))]
        site = site_of(self._config, module)
        if leaf == "weight" and site is not None and site.size and self._takes(module):
            tensor = tensor[:, _channels(site, self._order(site).cpu())]
        return Known(tensor)

    def _rows(self, site: Site, count: int) -> torch.Tensor:
        """The checkpoint's row at each place of a product."""
        order, rows = self._order(site).cpu(), torch.arange(count)
        rows[site.start : site.start + site.size] = site.start + order
        if site.gate:
            rows[site.start - site.size : site.start] = site.start - site.size + order
        return rows

    def _order(self, site: Site) -> torch.Tensor:
        """int64 [size]: the checkpoint's row, from the site's start, at each place."""
        if site.reader not in self._orders:
            read = lambda module: self.read(module, "weight").to(self._device).float()  # noqa: E731
            probes: dict[int, torch.Tensor] = {}
            theirs, ours = (_marks(site, weights, probes) for weights in (read, self._stored))
            self._orders[site.reader] = _nearest(theirs, ours, site.head or site.size)
        return self._orders[site.reader]


def _channels(site: Site, order: torch.Tensor) -> torch.Tensor:
    """The channel of the checkpoint at each place of an input whose rows are in an order."""
    if site.shared == 1:
        return order
    within = order.view(-1, 1, site.head) % site.head  # [heads, 1, d]
    starts = torch.arange(len(within) * site.shared).view(-1, site.shared, 1) * site.head
    return (within + starts).flatten()


def _marks(
    site: Site, weights: Callable[[str], torch.Tensor], probes: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Some values for each channel [size, m]: its row, its gate's and its columns, each by random sums."""
    maker = weights(site.maker)
    parts = [maker[site.start : site.start + site.size]]
    if site.gate:
        parts.append(maker[site.start - site.size : site.start])
    parts.append(by_row(site, weights(site.reader).T).flatten(1))
    return torch.cat([_sums(part, probes) for part in parts], dim=1)


def _sums(rows: torch.Tensor, probes: dict[int, torch.Tensor]) -> torch.Tensor:
    size = rows.shape[1]
    if size not in probes:
        generator = torch.Generator().manual_seed(size)
        probes[size] = torch.randn(size, _PROBES, generator=generator).to(rows.device)
    found = rows @ probes[size]
    return found / found.norm().clamp(min=1e-30)


def _nearest(theirs: torch.Tensor, ours: torch.Tensor, block: int) -> torch.Tensor:
    """For each of ``ours`` the nearest of ``theirs`` in the same block, each taken once."""
    found = []
    for start in range(0, len(ours), block):
        own, other = ours[start : start + block], theirs[start : start + block]
        near = torch.cat([torch.cdist(part, other).argmin(1) for part in own.split(_PIECE)])
        found.append(start + _once(near, own, other))
    return torch.cat(found)


def _once(near: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``near`` with places that are taken twice given to those that are free, so that equal rows share."""
    near = near.clone()
    taken, twice = set(), []
    for place, one in enumerate(near.tolist()):
        if one in taken:
            twice.append(place)
        taken.add(one)
    left = [one for one in range(len(other)) if one not in taken]
    for place in twice:
        distances = (other[left] - own[place]).square().sum(1)
        near[place] = left.pop(int(distances.argmin()))
    return near
