"""Weights whose channels AWQ or SmoothQuant rescaled: their factors, derived from what is stored.

What makes a channel is divided by its factor, and what reads it multiplied. A norm's weight gives the factor
to the precision of its dtype. Rows of a product give it by least squares, and so do the columns of the
product that reads them: both must agree, so that a wrong scale on either side shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.building.source.folding_sites import Site, maker_of, site_of
from ingot.building.source.tensor_origin import Known, Origin, Read
from ingot.config.decoder_config import DecoderConfig

_SIGMAS = 8.0  # whose standard deviation is itself estimated, of some dozen values
_KEPT = (2.0, 1.2, 0.8, 0.6)  # scales that a value may be off to be counted
_SLACK = 2**-7  # relative: of what rounded scales and norms leave of a bound
_LEAST_KEPT = 0.5  # of a row; at half its range one value of eight is clipped
_UNKNOWN = 1e3  # relative: nothing is known
_TINY = torch.finfo(torch.float32).tiny
Stored = Callable[[str], torch.Tensor]  # a linear layer's weight [N, K] as the engine's values mean it
Leaf = Callable[[str, str], torch.Tensor]  # a stored tensor


@dataclass(frozen=True)
class Factors:
    """What channels were multiplied by, fp32 [K], how well that is known (relative, [K]), and how far
    rounding to few bits may shift all of them alike.
    """

    values: torch.Tensor
    uncertain: torch.Tensor
    shift: float = 0.0


class Folded(Origin):
    """Tensors of a model some of whose channels have factors.

    ``takes(reader)``: whether the method chose factors for a layer's input.
    """

    def __init__(
        self,
        read: Read,
        config: DecoderConfig,
        stored: Stored,
        scales: Stored,
        leaf: Leaf,
        takes: Callable[[str], bool],
        unit: float,
        device: torch.device,
    ) -> None:
        super().__init__(read)
        self._config = config
        self._device = device
        self._stored = stored
        self._scales = scales
        self._leaf = leaf
        self._takes = takes
        self._unit = unit
        self._found: dict[str, Factors] = {}

    def leaf(self, module: str, leaf: str) -> Known:
        """A norm's weight is what factors are derived from; its bias, and a maker's, are divided."""
        reader = self._reader_of(module)
        if reader is None:
            return Known(self.read(module, leaf))
        site = self._site(reader)
        if not site.size:
            if leaf == "weight":
                return Known(self._leaf(module, leaf))
            found = self._of_norm(site)
            return Known(self._wide(module, leaf) / found.values, found.uncertain)
        if leaf == "weight":
            return self.weight(module)
        rows = self._of_rows(site)
        return Known(self._wide(module, leaf) / rows.values, rows.uncertain)

    def weight(self, module: str) -> Known:
        """With the factors of its input, and those of its outputs."""
        tensor = self._wide(module)
        columns: Factors | None = None
        site = site_of(self._config, module)
        if site is not None and site.linear and self._takes(module):
            columns = self._of_norm(site) if not site.size else self._of_columns(site)
        reader = self._reader_of(module)
        rows = None if reader is None else self._of_rows(self._site(reader))
        if columns is not None:
            tensor = tensor * columns.values
        if rows is not None:
            tensor = tensor / rows.values[:, None]
        uncertain = (0.0 if one is None else one.uncertain for one in (rows, columns))
        return Known(tensor, *uncertain)

    def factors(self, module: str) -> torch.Tensor | None:
        """Of an input that rows of a product make: each channel, and all of them at once."""
        site = site_of(self._config, module)
        if site is None or not site.size or not site.linear or not self._takes(module):
            return None
        columns, rows = self._of_columns(site), self._of_rows(site)
        made = by_row(site, columns.values)[:, 0], by_row(site, columns.uncertain)[:, 0]
        part = slice(site.start, site.start + site.size)
        off = made[0] / rows.values[part] - 1
        noise = (made[1].square() + rows.uncertain[part].square()).sqrt()
        shift = columns.shift + rows.shift
        known = noise < 0.5
        if not bool(known.any()):
            return torch.zeros(1)
        mean, error = off[known].mean().abs(), noise[known].square().mean().sqrt() / known.sum().sqrt()
        return torch.cat([off.abs() / (noise + shift).clamp(min=_TINY), (mean / (error + shift))[None]])

    def _site(self, reader: str) -> Site:
        found = site_of(self._config, reader)
        assert found is not None
        return found

    def _reader_of(self, module: str) -> str | None:
        """The layer whose input a module makes, where the method took it."""
        site = maker_of(self._config, module)
        return site.reader if site is not None and site.linear and self._takes(site.reader) else None

    def _wide(self, module: str, leaf: str = "weight") -> torch.Tensor:
        return self.read(module, leaf).to(self._device).float()

    def _of_norm(self, site: Site) -> Factors:
        """The checkpoint's weight of a norm over the stored one; nothing is known where either is 0."""
        before, after = self._wide(site.maker), self._leaf(site.maker, "weight").to(self._device).float()
        known = (after != 0) & (before != 0)
        values = torch.where(known, before / torch.where(known, after, 1), 1)
        return Factors(values, torch.where(known, self._unit, _UNKNOWN))

    def _of_columns(self, site: Site) -> Factors:
        """By the product that reads the channels; those that one row makes are fitted at once."""
        if site.reader not in self._found:
            weight, got = self._wide(site.reader), self._stored(site.reader)
            assert self._reader_of(site.reader) is None, "no product stands on both sides of a site"
            sides = (weight.T, got.T, self._scales(site.reader).T)
            found = _least_squares(*(by_row(site, part).flatten(1) for part in sides))
            parts = [found.values, found.uncertain]
            if site.shared > 1:
                heads = (part.view(-1, 1, site.head) for part in parts)
                parts = [part.expand(-1, site.shared, -1).flatten() for part in heads]
            self._found[site.reader] = Factors(parts[0], parts[1], found.shift)
        return self._found[site.reader]

    def _of_rows(self, site: Site) -> Factors:
        """What rows were divided by, [N]; 1 for rows that make no channel."""
        key = f"{site.maker} of {site.reader}"
        if key not in self._found:
            part = slice(site.start, site.start + site.size)
            whole = self._wide(site.maker)
            weight, got, scales = whole[part], self._stored(site.maker)[part], self._scales(site.maker)[part]
            before = site_of(self._config, site.maker)
            if before is not None and self._takes(site.maker):
                weight = weight * self._of_norm(before).values
            found = _least_squares(weight, got, scales)
            ones = torch.ones(len(whole), device=self._device)
            values, uncertain = ones.clone(), torch.zeros_like(ones)
            values[part], uncertain[part] = 1 / found.values, found.uncertain
            self._found[key] = Factors(values, uncertain, found.shift)
        return self._found[key]


def _least_squares(weight: torch.Tensor, got: torch.Tensor, scales: torch.Tensor) -> Factors:
    """What ``got`` is ``weight`` times, for each row of both [n, m], each value counted in its own scales.

    A value that is smaller than rounding makes it was clipped, and says nothing of its factor: such values
    are left out. None is larger, also where it was clipped, which gives a least factor: without it a row of a
    few clipped values may fit them and leave others out. Where it makes many of them clipped, some are not of
    this weight, and it is not used. Rounding depends on what it rounds, so that a factor may be off by the
    share of its errors in all squares.
    """
    scales = scales.clamp(min=_TINY)
    weight, got = weight / scales, got / scales
    values, kept = _fitted(weight, got, None)
    above, more = _fitted(weight, got, _least(weight, got))
    better = more.mean(1) >= _LEAST_KEPT
    values, kept = torch.where(better, above, values), torch.where(better[:, None], more, kept)
    error = kept * (got - weight * values[:, None]).square()
    squares = (kept * weight.square()).sum(1).clamp(min=_TINY)
    sigma = (error * weight.square()).sum(1).sqrt() / squares / values.abs().clamp(min=_TINY)
    all_squares = (kept * got.square()).clamp(min=0)
    shifts = error.sum(1) / all_squares.sum(1).clamp(min=_TINY)
    known = (values > 0) & (shifts < 1)
    shift = float(error.sum() / all_squares.sum().clamp(min=_TINY))
    uncertain = torch.where(known, _SIGMAS * sigma + shifts, _UNKNOWN)
    return Factors(torch.where(known, values, 1), uncertain, shift)


def _fitted(
    weight: torch.Tensor, got: torch.Tensor, least: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [n], and which values they were fitted to, 1 or 0 [n, m]; ``least``: none begins below it."""
    values = _slope(weight, got, torch.ones_like(weight))
    for most in _KEPT:
        if least is not None:
            values = torch.maximum(values, least)
        meant = weight * values[:, None]
        larger = (got - meant) * torch.where(got == 0, meant, got).sign()
        kept = ((larger <= most) & (larger >= (-most if least is None else -_KEPT[-1]))).float()
        values = _slope(weight, got, kept)
    return values, kept


def _least(weight: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """The least factor of each row that brings every value within half a scale of what is stored, or beyond
    it, as far as signs agree.
    """
    bounds = (got.abs() - 0.5) / weight.abs().clamp(min=_TINY)
    return torch.where(got * weight > 0, bounds, 0).amax(1).clamp(min=0) * (1 - _SLACK)


def _slope(weight: torch.Tensor, got: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (kept * weight * got).sum(1) / (kept * weight.square()).sum(1).clamp(min=_TINY)


def by_row(site: Site, channels: torch.Tensor) -> torch.Tensor:
    """Channels [K, ...] by the row that makes them: [rows, shared, ...]."""
    if site.shared == 1:
        return channels[:, None]
    heads = channels.unflatten(0, (-1, site.shared, site.head))
    return heads.transpose(1, 2).flatten(0, 1)
