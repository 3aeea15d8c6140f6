"""How far rounding may move the outputs of a product by blocks, apart from the products that are held to it.

A product by blocks (kernels/rows/block_rows.py) adds up an exact whole sum of each of its B blocks, times a
scale, and then adds what zeros take away:

    y = Σ_b t_b - Z,   t_b = s_b Σ q w,   Z = Σ_b s_b z_b Σ w

Where a block's values are far from zero, its t_b is many times as large as y, and the rounding of fp32 is a
share of t_b, not of y. There are 2 B + 3 roundings: each t_b, each sum of them, the row's scale, Z as it is
stored, and its sum with the rest. Each is at most half of fp32's epsilon of a value that is at most
A = Σ |t_b| + |Z|, whatever the order of the sums. So y is off by (2 B + 3) eps/2 A at most, and independent
roundings come to sqrt(2 B + 3) eps/2 A.
"""

from __future__ import annotations

import math

import torch

_HALF_EPS = torch.finfo(torch.float32).eps / 2  # products add in fp32, whatever the engine's dtype


def block_noise(
    x: torch.Tensor, weight: torch.Tensor, steps: torch.Tensor, zeros: torch.Tensor, block: int
) -> torch.Tensor:
    """[T, N], in the dtype of ``x``: what one unit of rounding is elsewhere.

    Args:
        x: [T, K], what rounded activations mean: (q - zero) · step, columns by blocks.
        weight: [N, K], what the stored weight means, columns in the same order.
        steps, zeros: [blocks].
        block: columns of a block; the last may be shorter.
    """
    moved = (steps * zeros).to(x)
    taken, added = x.new_zeros(len(weight)), x.new_zeros(len(x), len(weight))
    for own, columns, shift in zip(x.split(block, 1), weight.split(block, 1), moved, strict=True):
        taken += shift * columns.sum(1)
        added += ((own + shift) @ columns.T).abs()
    return (added + taken.abs()) * (_HALF_EPS * math.sqrt(2 * len(moved) + 3))
