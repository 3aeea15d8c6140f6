"""Activations rounded to 8 or 4 bits, in plain floating point: a second reading of the kernels' rules.

References use it, so that they share nothing with kernels/rows/int8_rows.py, kernels/rows/block_rows.py and
kernels/cache/cache_scales.py, which they judge.
"""

from __future__ import annotations

import torch

_MOST = 127
_LOWEST = -128  # of a scale that is not the row's own
_TINY = 1e-10
_SPLIT_BITS = 22  # below a largest magnitude's next power of two, whose exponent is at least _SPLIT_LEAST
_SPLIT_LEAST = -99
_TIE = 2**-20  # relative: what a division in fp32 and one by a reciprocal are apart, on a GPU
_E4M3_MOST, _E4M3_LEAST_POWER, _E4M3_FRACTION = 448, -6, 3


def rounded_rows(
    x: torch.Tensor, group: int = 0, scale: torch.Tensor | None = None, *, flips: bool = False
) -> torch.Tensor:
    """x [..., K] as multiples of its rows' scales, largest magnitude / 127, in its own dtype.

    Args:
        group: so many neighbouring columns have scales of their own; 0: the row.
        scale: [1], the same for all, whatever the ``group``; what lies beyond -128 and 127 times it is cut.
        flips: in each row the value that is nearest to the middle between two values goes the other way, and
            so does every exact tie.
    """
    pieces = x.unflatten(-1, (-1, group)) if group and scale is None else x[..., None, :]
    scales = (
        pieces.abs().amax(-1, keepdim=True).clamp(min=_TINY) / _MOST if scale is None else scale.to(pieces)
    )
    exact = pieces / scales
    near = exact.round()
    low = -_MOST if scale is None else _LOWEST
    if flips:
        near = _other_way(exact.flatten(-2), near.flatten(-2), low, _MOST).view_as(near)
    return (near.clamp(low, _MOST) * scales).flatten(-2)


def split_rows(x: torch.Tensor, columns: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] as a CPU's products of 8 or 4 stored bits read it, in its own dtype.

    Values are rounded to multiples of 2^(e - 21), 2^e ≤ m < 2^(e + 1), m the largest magnitude of ``columns``
    neighbours once they are in ``order`` [K].
    """
    gathered = x if order is None else x.index_select(-1, order.to(x.device, torch.int64))
    pieces = gathered.unflatten(-1, (-1, columns))
    exponents = (
        torch.frexp(pieces.abs().amax(-1, keepdim=True)).exponent.clamp(min=_SPLIT_LEAST) - _SPLIT_BITS
    )
    steps = torch.ldexp(torch.ones_like(pieces[..., :1]), exponents)
    near = ((pieces / steps).round() * steps).flatten(-2)
    if order is None:
        return near
    return torch.empty_like(near).index_copy_(-1, order.to(x.device, torch.int64), near)


def rounded_heads(x: torch.Tensor, kv_dtype: str, *, flips: bool = False) -> torch.Tensor:
    """Keys or values x [..., head_dim] as a KV cache in ``kv_dtype`` holds them, in their own dtype.

    ``kv_dtype``: ``int8`` or ``fp8``; any other is a cache in the model's dtype: x itself. ``flips`` as of
    ``rounded_rows``; nearest is measured in the gap between the two values.
    """
    if kv_dtype == "int8":
        return rounded_rows(x, flips=flips)
    return rounded_e4m3(x, flips=flips) if kv_dtype == "fp8" else x


def rounded_e4m3(x: torch.Tensor, group: int = 0, *, flips: bool = False) -> torch.Tensor:
    """x [..., K] as values of e4m3 times its rows' scales, largest magnitude / 448, in its own dtype.

    ``group`` and ``flips`` as of ``rounded_rows``; nearest is measured in the gap between the two values.
    """
    if group:
        return rounded_e4m3(x.unflatten(-1, (-1, group)), flips=flips).flatten(-2)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=_TINY) / _E4M3_MOST
    exact = x / scale
    step = e4m3_gaps(exact)
    near = (exact / step).round() * step
    if flips:
        off = exact - near
        close = (off / step).abs()
        ties = close >= 0.5 - _TIE * (exact / step).abs()
        ties.scatter_(-1, close.argmax(-1, keepdim=True), True)
        near = near + torch.where(ties, off.sign() * step, 0)
    return near.clamp(-_E4M3_MOST, _E4M3_MOST) * scale


def e4m3_gaps(values: torch.Tensor) -> torch.Tensor:
    """How far apart the values of e4m3 around ``values`` are: those in [2^e, 2^(e+1)) are 2^(e - 3) apart,
    and those below 2^-6 are 2^-9 apart.
    """
    power = (torch.frexp(values).exponent - 1).clamp(min=_E4M3_LEAST_POWER)
    return torch.ldexp(torch.ones_like(values), power - _E4M3_FRACTION)


def rounded_blocks(
    x: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    block: int,
    bits: int,
    order: torch.Tensor | None = None,
    *,
    flips: bool = False,
) -> torch.Tensor:
    """x [..., K] as multiples of fixed scales of its blocks of columns, in its own dtype and its own order.

    Args:
        scales, zeros: [blocks]; a value means (q - zero) · scale with q in -2^(bits-1) … 2^(bits-1) - 1.
        block: columns of a block, the last may be shorter.
        order: int64 [K], blocks are of x[..., order]; None: of x.
        flips: as of ``rounded_rows``.
    """
    columns = x if order is None else x[..., order]
    scale, zero = (part.to(x).repeat_interleave(block)[: x.shape[-1]] for part in (scales, zeros))
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    exact = columns / scale + zero
    near = (columns / scale).round() + zero
    if flips:
        near = _other_way(exact, near, low, high)
    values = (near.clamp(low, high) - zero) * scale
    return values if order is None else torch.empty_like(values).index_copy_(-1, order, values)


def _other_way(exact: torch.Tensor, near: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Values [..., K] with the closest call of each row, of those that are not cut, decided otherwise; and
    with it every value that is as close to a middle as fp32 can compute: in 16 bits, many are where a row's
    largest magnitude is a multiple of 127.
    """
    off = exact - near
    close = torch.where((exact < low) | (exact > high), torch.zeros_like(off), off.abs())
    ties = close >= 0.5 - _TIE * exact.clamp(low, high).abs()
    ties.scatter_(-1, close.argmax(-1, keepdim=True), True)
    return near + torch.where(ties, off.sign(), 0)
