"""Kernels that start while the one before them ends, where a step's order allows it.

Owns the choice for kernels that do not start early by default. Knows no kernel.

    attention.place(qkv, batch, cache, rope, early_tiles(qkv))
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.overlap import overlaps


def early_tiles(x: torch.Tensor) -> Mapping[str, int]:
    """Tiles of a kernel that reads ``x`` and starts early, where the GPU can."""
    return {"OVERLAP": 2} if overlaps(x.device) else {}
