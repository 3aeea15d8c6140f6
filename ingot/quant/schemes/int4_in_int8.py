"""Weights in 4 bits inside values of 8, activations in 8 bits: w4a8.

Few rows (int8_tiles.py: ``INT8_FRAGMENT_ROWS``), and on Hopper any number of them, multiply by pairs that
become bytes in registers. On other GPUs a product of more rows first writes the weight as int8 into a
temporary, N bytes per column: a pass that writes a byte per weight, and another that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.tiles.int8_tiles import INT8_FRAGMENT_ROWS
from ingot.kernels.tiles.product_tiles import has_warpgroups
from ingot.kernels.tiles.warpgroup_tiles import STEP
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, expanded, fits_int8, num_groups, pack_pairs
from ingot.kernels.weight.stored_weight import PIECE
from ingot.quant.methods.gptq import gptq
from ingot.quant.quantized_values import Quantized, Values
from ingot.quant.schemes.int8_products import Int8Products
from ingot.quant.schemes.linear_scheme import PIECE_BYTES, Tensors, tensor_of
from ingot.quant.schemes.two_level_scales import inner_scales, quantize_two_level, two_levels


@dataclass(frozen=True)
class Int4InInt8(Int8Products):
    """W = scale · (q - zero) · inner with q in 0 … 15; x in 8 bits by rows as they come.

    Tensors: ``pairs`` uint8 [N, K padded to whole groups / 2], ``steps`` (inner scales) and ``zeros`` uint8
    [groups, N], ``scales`` fp32 [N], ``bias`` [N] where there is one.

    Attributes:
        group: columns that share an inner scale and a zero, 128 or 64.
        input_group: so many neighbouring activations of a row share a scale; 0: the row.
    """

    group: int = 128
    input_group: int = 0
    name: ClassVar[str] = "w4a8"
    fixed: ClassVar[frozenset[str]] = frozenset({"scales"})

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        groups = num_groups(in_features, self.group)
        return {
            "pairs": torch.empty(out_features, groups * self.group // 2, dtype=torch.uint8),
            "steps": torch.empty(groups, out_features, dtype=torch.uint8),
            "zeros": torch.empty(groups, out_features, dtype=torch.uint8),
            "scales": torch.empty(out_features, dtype=torch.float32),
        }

    def quantize(self, weight: torch.Tensor) -> Quantized:
        return quantize_two_level(weight, self.group)

    def compensated(self, weight: torch.Tensor, hessian: torch.Tensor) -> Quantized:
        """On the grid of both levels of the weight as it is."""
        levels = two_levels(weight, self.group, hessian.diagonal())
        found = gptq(
            weight,
            hessian,
            4,
            self.group,
            symmetric=False,
            act_order=True,
            scale_dtype=torch.float32,
            grid=levels.grid(),
        ).quantized
        return levels.quantized(found.values, self.group)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        assert isinstance(found, Quantized)
        assert found.units is not None
        assert found.zeros is not None
        assert input_scale is None, "activation scales are computed at run time"
        inner = inner_scales(found)
        assert fits_int8(inner, found.zeros), "a group's values do not fit int8"
        return {
            "pairs": pack_pairs(found.values, self.group, found.zeros),
            "steps": inner,
            "zeros": found.zeros,
            "scales": found.units,
        }

    def expanded_bytes(self, out_features: int, in_features: int, kernels: bool) -> int:
        """The weight as int8, whole on a CPU too, with a piece's temporaries there."""
        own = out_features * num_groups(in_features, self.group) * self.group
        return own if kernels else own + min(own, PIECE) * PIECE_BYTES

    def int4_weight(self, tensors: Tensors, in_features: int) -> Int4Weight:
        names = ("pairs", "steps", "zeros", "scales")
        pairs, steps, zeros, scales = (tensor_of(tensors, name) for name in names)
        return Int4Weight(pairs, steps, zeros, scales, self.group, in_features)

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> AnyInt8:
        """The weight as it is stored; a product that cannot read it writes its own int8 temporary."""
        return self.int4_weight(tensors, in_features)

    def placing_rows(self, device: torch.device) -> int:
        """Beyond the rows that read pairs, groups of warps multiply, if they can: they place nothing."""
        by_groups = has_warpgroups(device) and self.group == STEP
        return INT8_FRAGMENT_ROWS if by_groups else super().placing_rows(device)

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        return expanded(self.int4_weight(tensors, in_features))
