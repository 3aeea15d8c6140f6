"""Random rows and weights in 8 bits whose products are of order one.

x, weight = int8_rows(5, 96), int8_weight(40, 96)
"""

from __future__ import annotations

import torch

from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight, quantize_rows
from tests.kernels.numerics import normal

LARGE_TILES = {
    "BLOCK_M": 64,
    "BLOCK_N": 32,
    "BLOCK_K": 32,
    "num_warps": 4,
    "num_stages": 2,
    "PIECES": 1,
    "MORE_N": 0,
}  # of kernels of many rows


def int8_rows(
    rows: int, width: int, device: str = "cpu", group: int = 0, static: bool = False, seed: int = 0
) -> Int8Rows:
    """Normal rows of unlike magnitude, quantized; in groups of unlike magnitude."""
    x = normal(rows, width, dtype=torch.float32, device=device, seed=seed)
    scale = torch.tensor([4.0 / 127], device=device) if static else None
    if group:
        x = (
            x.unflatten(1, (-1, group)) * (1 + torch.arange(width // group, device=device) % 3)[:, None]
        ).flatten(1)
    elif not static:
        x = x * (1 + torch.arange(rows, device=device) % 3)[:, None]
    return quantize_rows(x, group, scale)


def int8_weight(outputs: int, width: int, device: str = "cpu", seed: int = 1) -> Int8Weight:
    """Numbers of every size, and scales that bring products to order one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (outputs, width), generator=generator, dtype=torch.int8)
    scales = (torch.rand(outputs, generator=generator) + 0.5) / (73 * width**0.5)
    return Int8Weight(values.to(device), scales.to(device))
