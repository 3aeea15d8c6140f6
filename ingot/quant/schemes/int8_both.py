"""Weights and activations in 8 bits: w8a8."""

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
from ingot.quant.schemes.linear_scheme import Tensors, tensor_of


@dataclass(frozen=True)
class Int8Both(Int8Products):
    """W = q · scale with q in -127 … 127, one scale per row; x alike, by rows as they come or by one scale.
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
        if not self.per_tensor:
            return quantize(weight, 8, scale_dtype=torch.float32)
        found = quantize(weight.reshape(1, -1), 8, scale_dtype=torch.float32)
        scales = found.scales.expand(len(weight)).contiguous()
        return Quantized(found.values.view_as(weight), scales, None, 8, 0)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        padding = -found.values.shape[1] % DESCRIPTOR_ALIGNMENT
        tensors = {"weight": F.pad(found.values, (0, padding)), "scales": found.scales.float()}
        if not self.static:
            return tensors
        if input_scale is None or not 0 < float(input_scale) < float("inf"):
            raise BuildError(
                "static activations need a positive scale from calibration",
                seen="none" if input_scale is None else float(input_scale),
                fix="`calib`, or `activations=dynamic`",
            )
        return tensors | {"input_scale": input_scale.float().reshape(1)}

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        """A view; ``values`` [N, K] has rows of a multiple of 16 bytes."""
        return Int8Weight(tensor_of(tensors, "weight")[:, :in_features], tensor_of(tensors, "scales"))

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        return self.int8_weight(tensors, in_features)
