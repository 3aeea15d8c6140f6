"""What a stored weight of few bits means, read a second time from the description of its layout.

Columns find their words and bits by index instead of by reshaping, so that references share nothing with what
they judge: kernels/weight/stored_weight.py and kernels/weight/int4_weight.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ingot.kernels.weight.stored_weight import StoredWeight


def meaning(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] = (q - zero) · scale in fp32, rounded to ``dtype`` once; in fp64 where that is the dtype."""
    if weight.scales is None:
        return weight.values.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    columns = torch.arange(weight.in_features, device=weight.values.device)
    groups = columns // weight.group if weight.group else torch.zeros_like(columns)
    zeros: torch.Tensor | int = 1 << weight.bits - 1
    if weight.zeros is not None:
        zeros = torch.atleast_2d(weight.zeros)[groups].T.to(wide)
    scales = torch.atleast_2d(weight.scales)[groups].T.to(wide)
    found = ((_values(weight).to(wide) - zeros) * scales).to(dtype)
    if weight.order is None:
        return found
    own = torch.empty_like(found)
    own[:, weight.order.long()] = found
    return own


@dataclass(frozen=True, slots=True)
class PlainGrid:
    """Rows of a weight and what each of its values could have been, in groups [N, G, n] of columns that share
    a scale. The last group is filled with zeros.

    Attributes:
        meant: fp32 [N, G, n], columns in the order in which they are stored.
        scales: fp32 [N, G], magnitudes.
        low, high: fp32 [N, G], the least and the largest that a value could mean.
        units: fp32 [N] where a row's scales are whole multiples of it.
    """

    meant: torch.Tensor
    scales: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    units: torch.Tensor | None = None


def grid_of_words(weight: StoredWeight) -> PlainGrid:
    """Of weights in words; symmetric ones of 8 bits use 1 to 255."""
    assert weight.scales is not None
    scales = torch.atleast_2d(weight.scales).T.float()  # [N, G]
    zeros = torch.full_like(scales, 1 << weight.bits - 1)
    if weight.zeros is not None:
        zeros = torch.atleast_2d(weight.zeros).T.float()
    blocks = in_groups(_values(weight).float(), weight.group, zeros[:, -1:])
    blocks = (blocks - zeros[..., None]).mul_(scales[..., None])
    least = int(weight.zeros is None and weight.bits == 8) - zeros
    return _with_ends(blocks, scales, least * scales, ((1 << weight.bits) - 1 - zeros) * scales)


def grid_of_int8(values: torch.Tensor, scales: torch.Tensor) -> PlainGrid:
    """Of int8 values [N, K] with a scale per row."""
    rows = scales.float()[:, None]
    return _with_ends((values.float() * rows)[:, None], rows, -127 * rows, 127 * rows)


def grid_of_e4m3(values: torch.Tensor, scales: torch.Tensor) -> PlainGrid:
    """Of values [N, K] in e4m3, by their bits: sign, exponent plus 7, fraction. Scales are of rows [N], or
    [N, G] of groups of K / G columns.
    """
    bits = values.view(torch.uint8).int()
    power, fraction = (bits >> 3) & 15, (bits & 7).float()
    size = torch.where(power > 0, torch.ldexp(1 + fraction / 8, power - 7), torch.ldexp(fraction, power - 9))
    size = torch.where((bits & 127) == 127, torch.nan, size)
    rows = scales.float().reshape(len(scales), -1)
    meant = torch.where(bits > 127, -size, size).unflatten(1, (rows.shape[1], -1)) * rows[..., None]
    return _with_ends(meant, rows, -448 * rows, 448 * rows)


def grid_of_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> PlainGrid:
    """Of RPTQ's values of 4 bits times a whole factor of their block: the largest that divides them all."""
    blocks = in_groups(values.float(), block)
    factors = blocks.abs().int()
    while factors.shape[-1] > 1:  # the greatest common divisor
        factors = F.pad(factors, (0, factors.shape[-1] % 2))
        factors = torch.gcd(factors[..., ::2], factors[..., 1::2])
    rows = factors[..., 0].clamp(min=1).float() * scales.float()[:, None]
    meant = blocks * scales.float()[:, None, None]
    most = torch.maximum(8 * rows, meant.abs().amax(-1))
    return replace(_with_ends(meant, rows, -most, most), units=scales.float())


def grid_of_pairs(
    pairs: torch.Tensor,
    inner: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    columns: int,
) -> PlainGrid:
    """Of values of 4 bits in pairs, with whole inner scales and zeros [groups, N]."""
    place = torch.arange(columns, device=pairs.device)
    within = place % group
    byte = place // group * (group // 2) + within % (group // 2)
    values = pairs[:, byte] >> (4 * (within // (group // 2))).to(torch.uint8) & 15
    own, rows = zeros.T.float(), inner.T.float() * scales.float()[:, None]
    blocks = in_groups(values.float(), group, own[:, -1:])
    meant = (blocks - own[..., None]).mul_(rows[..., None])
    return replace(_with_ends(meant, rows, -own * rows, (15 - own) * rows), units=scales.float())


def in_groups(values: torch.Tensor, group: int, fill: torch.Tensor | float = 0.0) -> torch.Tensor:
    """[N, K] → [N, G, n], the last group filled up; ``group`` 0: [N, 1, K]."""
    if not group:
        return values[:, None]
    missing = -values.shape[1] % group
    if missing:
        rest = torch.as_tensor(fill, dtype=values.dtype, device=values.device).expand(len(values), missing)
        values = torch.cat([values, rest], dim=1)
    return values.unflatten(1, (-1, group))


def _with_ends(
    meant: torch.Tensor, scales: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> PlainGrid:
    """A grid whose ends change places where a scale is negative."""
    return PlainGrid(meant, scales.abs(), torch.minimum(first, last), torch.maximum(first, last))


def _values(weight: StoredWeight) -> torch.Tensor:
    """q [N, K] int32, in the order in which columns are stored."""
    device = weight.values.device
    words = weight.values.shape[1]
    blocks = weight.values.reshape(-1, 16 * words)[:, _places(words, device)]
    found = blocks.view(-1, words)[: weight.out_features].to(torch.int32) & 0xFFFF
    width = min(weight.group or 64, 64)  # neighbouring columns of a part of the words
    shifts = torch.arange(0, 16, weight.bits, dtype=torch.int32, device=device)
    parts = found.view(len(found), -1, 1, width) >> shifts[:, None] & (1 << weight.bits) - 1
    return parts.flatten(1)[:, : weight.in_features]


def _places(words: int, device: torch.device) -> torch.Tensor:
    """The places of the words of 16 rows: [16 · words]."""
    row = torch.arange(16, device=device)[:, None]
    word = torch.arange(words, device=device)
    # A piece of 16 rows by 32 words: halves of four words, then threads (8 of rows, 4 of words), then the
    # two rows of a thread.
    place = word // 32
    place = place * 2 + word % 8 // 4
    place = place * 8 + row // 2
    place = place * 4 + word % 32 // 8
    place = place * 2 + row % 2
    return (place * 4 + word % 4).flatten()
