"""Which tiles are worth measuring, by op and shape; the kernels name them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.tiles import prefill_tiles, product_tiles
from ingot.kernels.weight.stored_weight import stored

Tiles = dict[str, int]


def candidates(
    op: str, shape: Mapping[str, int], rows: int, dtype: torch.dtype, device: torch.device
) -> list[Tiles]:
    """Tiles of an op of the plan for a shape and a number of rows, the default first."""
    size = dtype.itemsize
    if op.startswith("small_"):
        weight = stored(torch.empty(shape["n"], shape["k"], dtype=dtype, device="meta"))
        return product_tiles.candidate_tiles(rows, weight, size, device)
    if op == "paged_attention":
        heads = (shape["kv"], shape["q"] // shape["kv"], shape["d"])
        return paged_attention.candidate_tiles(*heads, size, device, rows)
    if op == "prefill_attention":
        return prefill_tiles.candidate_tiles(rows, shape["d"], size, device)
    if op in ("rms_norm", "layer_norm"):
        norm = rms_norm if op == "rms_norm" else layer_norm
        return norm.candidate_tiles(shape["h"], device)
    return (gated_mlp if op == "silu_mul" else rope_kv_write).candidate_tiles(device)
