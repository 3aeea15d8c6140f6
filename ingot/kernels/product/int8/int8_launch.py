"""What the launches of both products of many int8 rows share: the result that they write.

y = whole_sums(_choice, _launch, x, weight, torch.float16, bias, residual, out, tiles)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Sums
from ingot.kernels.weight.int4_weight import outputs_of

Tiles = Mapping[str, int]
# (rows, weight, bytes of a result's value, whether sums are in parts, tiles) → all tiles
Choose = Callable[[Int8Rows, Any, int, bool, "Tiles | None"], dict[str, int]]
# (rows, weight, bias, residual, y, all tiles): write y
Launch = Callable[[Int8Rows, Any, "torch.Tensor | None", "torch.Tensor | None", torch.Tensor, Tiles], None]


def whole_sums(
    choose: Choose,
    launch: Launch,
    x: Int8Rows,
    weight: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    tiles: Tiles | None,
) -> torch.Tensor:
    """x · Wᵀ + bias + residual [M, N] in ``dtype``, in ``out`` where there is one; without rows no launch."""
    shape = (x.values.shape[0], outputs_of(weight))
    y = torch.empty(shape, dtype=dtype, device=x.values.device) if out is None else out
    if y.numel():
        choice = choose(x, weight, dtype.itemsize, False, tiles)
        launch(x, weight, bias, residual, y, choice | {"SPLITS": 1})
    return y


def parted_sums(
    choose: Choose, launch: Launch, x: Int8Rows, weight: Any, tiles: Tiles | None
) -> Int8Sums | torch.Tensor:
    """Parts of the sums [SPLITS, M, N]: int32, or scaled ones in fp32 of e4m3 and of rows with groups."""
    scaled = bool(x.group) or x.values.dtype == E4M3
    dtype = torch.float32 if scaled else torch.int32
    choice = choose(x, weight, dtype.itemsize, True, tiles)
    shape = (choice["SPLITS"], x.values.shape[0], outputs_of(weight))
    y = torch.empty(shape, dtype=dtype, device=x.values.device)
    if y.numel():
        launch(x, weight, None, None, y, choice)
    return y if scaled else Int8Sums(y, x.scales, weight.scales)
