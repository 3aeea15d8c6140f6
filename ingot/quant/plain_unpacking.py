"""What a stored weight of few bits means, read a second time from the description of its layout.

Owns the way from a column to its word and bits, by index instead of by reshaping, for references that share
nothing with what they judge. The layout is described in kernels/weight/stored_weight.py. Knows no layer.

    wide = meaning(weight, torch.float32)                 # [N, K]
"""

from __future__ import annotations

import torch

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


def _values(weight: StoredWeight) -> torch.Tensor:
    """q [N, K] int32, in the order in which columns are stored."""
    device, words = weight.values.device, weight.values.shape[1]
    row = torch.arange(weight.out_features, device=device)[:, None]
    word = torch.arange(words, device=device)
    # A piece of 16 rows by 32 words: halves of four words, then threads (8 of rows, 4 of words), then the
    # two rows of a thread.
    place = row // 16 * (words // 32) + word // 32
    place = place * 2 + word % 8 // 4
    place = place * 8 + row % 16 // 2
    place = place * 4 + word % 32 // 8
    place = place * 2 + row % 2
    place = place * 4 + word % 4
    found = weight.values.reshape(-1)[place].to(torch.int32) & 0xFFFF
    width = min(weight.group or 64, 64)  # neighbouring columns of a part of the words
    shifts = torch.arange(0, 16, weight.bits, dtype=torch.int32, device=device)
    parts = found.view(len(row), -1, 1, width) >> shifts[:, None] & (1 << weight.bits) - 1
    return parts.flatten(1)[:, : weight.in_features]
