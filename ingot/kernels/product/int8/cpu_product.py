"""Products of int8 on a CPU, by PyTorch's int8 product: the bits of ``int8_product`` (int8_rows.py), by which
fp8 is multiplied.

y = cpu_int8_product(quantize_rows(x), weight, torch.float32)      # [M, N]
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from ingot.kernels.rows.int8_rows import BLOCK, LEAST, MOST, Int8Rows, Int8Weight, int8_product
from ingot.kernels.weight.stored_weight import PIECE

SPREAD = 64  # rows up to which groups are spread over rows of their own


def cpu_int8_product(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · Wᵀ + bias in ``dtype`` [M, N]: exact sums, scaled in fp32, rounded once."""
    if x.values.dtype != torch.int8 or not exact_sums() or not x.values.numel():
        return _by_reference(x, weight, dtype, bias)
    if x.group:
        y = _grouped(x, weight.values)
    else:
        y = torch._int_mm(x.values, weight.values.T).float().mul_(x.scales[:, None])
    y.mul_(weight.scales)
    return (y if bias is None else y.add_(bias)).to(dtype)


@cache
def exact_sums() -> bool:
    """Whether int8 products are exact here for the largest values; old processors add pairs in 16 bits."""
    x = torch.tensor([[MOST], [LEAST]], dtype=torch.int8).repeat(2, 32)
    found = torch._int_mm(x, torch.full((16, 32), LEAST, dtype=torch.int8).T)
    return torch.equal(found, (x.int().sum(1, keepdim=True) * LEAST).expand(-1, 16).int())


def _grouped(x: Int8Rows, weight: torch.Tensor) -> torch.Tensor:
    """Sums by groups of columns, scaled and added up in ascending order."""
    rows, columns = x.values.shape
    groups = columns // x.group
    if rows * groups <= SPREAD:  # each group in a row of its own, beside zeros: one product
        spread = x.values.new_zeros(rows, groups, groups, x.group)
        spread.diagonal(dim1=1, dim2=2).copy_(x.values.view(rows, groups, x.group).transpose(1, 2))
        sums = torch._int_mm(spread.view(-1, columns), weight.T).view(rows, groups, -1).float()
        parts: Iterable[torch.Tensor] = sums.mul_(x.scales[..., None]).unbind(1)
    else:
        pairs = zip(x.values.split(x.group, 1), weight.split(x.group, 1), x.scales.unbind(1), strict=True)
        parts = (torch._int_mm(own, of.T).float().mul_(scale[:, None]) for own, of, scale in pairs)
    y: torch.Tensor | None = None
    for part in parts:
        y = part.clone() if y is None else y.add_(part)
    assert y is not None
    return y


def _by_reference(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """A piece of the weight at a time, widened to fp32."""
    rows = max(1, PIECE // max(weight.values.shape[1], 1))
    if weight.in_blocks:
        rows = -(-rows // BLOCK) * BLOCK
    pieces = []
    for start in range(0, weight.values.shape[0], rows):
        own = slice(start, start + rows)
        pieces.append(int8_product(x, weight.piece(own), dtype, None if bias is None else bias[own]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
