"""Weights and activations in 8 bits: w8a8.

Covers what the scheme stores; how it multiplies is int8_products.py's.

    scheme = Int8Both()
    y = scheme.apply(x, scheme.pack(weight, bias))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingot.errors import BuildError
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT
from ingot.quant.methods.rounding import quantize
from ingot.quant.quantized_values import Quantized, Values
from ingot.quant.schemes.int8_products import Int8Products
from ingot.quant.schemes.linear_scheme import Tensors


@dataclass(frozen=True)
class Int8Both(Int8Products):
    """W = q · scale with q in -127 … 127 and a scale a row; x the same, by rows as they come or by one scale.
    Checkpoints that others quantized may have -128 in W, which changes nothing.

    Tensors: ``weight`` int8 [N, K padded with zeros to a multiple of 16], ``scales`` fp32 [N], with
    ``static`` also ``input_scale`` fp32 [1], ``bias`` [N] where there is one.

    Attributes:
        static: activations have the one scale that calibration found; else each row has its own.
        per_tensor: all rows of the weight have the same scale; it is stored for each all the same.
        input_group: not ``static``: so many neighbouring activations of a row share a scale; 0: the row.
    """

    static: bool = False
    per_tensor: bool = False
    input_group: int = 0
    name: ClassVar[str] = "w8a8"
    fixed: ClassVar[frozenset[str]] = frozenset({"scales", "input_scale"})

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        padded = -(-in_features // DESCRIPTOR_ALIGNMENT) * DESCRIPTOR_ALIGNMENT
        tensors = {
            "weight": torch.empty(out_features, padded, dtype=torch.int8),
            "scales": torch.empty(out_features, dtype=torch.float32),
        }
        return tensors | ({"input_scale": torch.empty(1, dtype=torch.float32)} if self.static else {})

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """The values nearest to ``weight`` [N, K]."""
        if not self.per_tensor:
            return quantize(weight, 8, scale_dtype=torch.float32)
        found = quantize(weight.reshape(1, -1), 8, scale_dtype=torch.float32)
        scales = found.scales.expand(len(weight)).contiguous()
        return Quantized(found.values.view_as(weight), scales, None, 8, 0)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Of symmetric values of 8 bits with a scale per row."""
        padding = -found.values.shape[1] % DESCRIPTOR_ALIGNMENT
        tensors = {"weight": F.pad(found.values, (0, padding)), "scales": found.scales.float()}
        return tensors | ({"input_scale": _checked(input_scale)} if self.static else {})

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        """What int8 products multiply by: a view; ``values`` [N, K] has rows of a multiple of 16 bytes."""
        weight, scales = tensors["weight"], tensors["scales"]
        assert weight is not None
        assert scales is not None
        return Int8Weight(weight[:, :in_features], scales)

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        """The same: no kernel makes it."""
        return self.int8_weight(tensors, in_features)


def _checked(input_scale: torch.Tensor | None) -> torch.Tensor:
    if input_scale is None or not 0 < float(input_scale) < float("inf"):
        seen = "none" if input_scale is None else float(input_scale)
        raise BuildError(
            "static activations need a positive scale from calibration",
            seen=seen,
            fix="`calib`, or `activations=dynamic`",
        )
    return input_scale.float().reshape(1)
