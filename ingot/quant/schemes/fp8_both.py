"""Weights and activations in e4m3 (fp8): w8a8-fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingot.errors import BuildError
from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.product.int8.int8_linear import INVARIANT_FP8_TILES, int8_linear
from ingot.kernels.rows.int8_rows import BLOCK, E4M3, Int8Rows, Int8Weight
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT
from ingot.quant.methods.rounding import quantize_e4m3, quantize_e4m3_blocks
from ingot.quant.plain_rows import e4m3_gaps
from ingot.quant.quantized_values import Quantized, Values
from ingot.quant.schemes.int8_products import Int8Products, multiply
from ingot.quant.schemes.linear_scheme import Tensors, tensor_of


@dataclass(frozen=True)
class Fp8Both(Int8Products):
    """W = q · scale with q in e4m3, at most 448 in magnitude, one scale per row; x alike, by rows.

    Tensors: ``weight`` e4m3 [N, K padded with zeros to a multiple of 16], ``scales`` fp32 [N], or in blocks
    [⌈N / 128⌉, K / 128], ``bias`` [N] where there is one. Sums of products are fp32: they depend on their
    order, unlike int8's.

    Attributes:
        per_tensor: all rows of the weight have the same scale; it is stored for each all the same.
        blocks: blocks of 128 rows and columns have scales, and 128 columns of each row of x; K is a multiple
            of 128.
    """

    per_tensor: bool = False
    blocks: bool = False
    name: ClassVar[str] = "w8a8-fp8"
    fixed: ClassVar[frozenset[str]] = frozenset({"weight", "scales"})
    input_dtype: ClassVar[torch.dtype] = E4M3

    @property
    def input_group(self) -> int:
        return BLOCK if self.blocks else 0

    @property
    def grouped_input(self) -> bool:
        return self.blocks

    def placing_rows(self, device: torch.device) -> int:
        return 0 if self.blocks else super().placing_rows(device)

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if self.blocks:
            _expect_blocks(in_features)
            shape = (-(-out_features // BLOCK), in_features // BLOCK)
            return {
                "weight": torch.empty(out_features, in_features, dtype=E4M3),
                "scales": torch.empty(shape, dtype=torch.float32),
            }
        padded = -(-in_features // DESCRIPTOR_ALIGNMENT) * DESCRIPTOR_ALIGNMENT
        return {
            "weight": torch.empty(out_features, padded, dtype=E4M3),
            "scales": torch.empty(out_features, dtype=torch.float32),
        }

    def quantize(self, weight: torch.Tensor) -> Quantized:
        if self.blocks:
            _expect_blocks(weight.shape[1])
            return quantize_e4m3_blocks(weight)
        return quantize_e4m3(weight, per_tensor=self.per_tensor)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        if self.blocks:  # the rows of a block have one scale
            return {"weight": found.values, "scales": found.scales[:, ::BLOCK].T.float().contiguous()}
        padding = -found.values.shape[1] % DESCRIPTOR_ALIGNMENT
        padded = F.pad(found.values.view(torch.uint8), (0, padding)).view(E4M3)
        return {"weight": padded, "scales": found.scales.float()}

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        """A view; ``values`` [N, K] has rows of a multiple of 16 bytes."""
        return Int8Weight(tensor_of(tensors, "weight")[:, :in_features], tensor_of(tensors, "scales"))

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        return self.int8_weight(tensors, in_features)

    def dequantize_input(
        self, rows: Int8Rows, tensors: Tensors, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of ``LinearScheme``; steps are the gaps between values on the side of ``like``."""
        wide, scales = super().dequantize_input(rows, tensors, like)
        return wide, e4m3_gaps(torch.minimum(wide.abs(), like.abs()) / scales) * scales

    def batch_invariant(self) -> Fp8Both:
        return InvariantFp8(self.per_tensor, self.blocks)


def _expect_blocks(in_features: int) -> None:
    if in_features % BLOCK:
        raise BuildError(
            "fp8 in blocks needs layers whose inputs are whole blocks",
            seen=f"{in_features} columns",
            allowed=f"a multiple of {BLOCK}",
            field="weight_scales",
            fix="`weight_scales=channel`",
        )


@dataclass(frozen=True)
class InvariantFp8(Fp8Both):
    """The same weights; every row is summed in one order, whatever the other rows."""

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        rows = self.quantize_input(x.reshape(-1, x.shape[-1]), tensors)
        weight, bias = self.int8_weight(tensors, x.shape[-1]), self._added(tensors)
        if runs_on_gpu(rows.values):
            y = int8_linear(rows, weight, x.dtype, bias, tiles=INVARIANT_FP8_TILES)
        else:  # the order of a matrix library's sums depends on the number of rows
            alone = (
                Int8Rows(values[None], scales[None], rows.group)
                for values, scales in zip(rows.values, rows.scales, strict=True)
            )
            y = torch.cat([multiply(row, weight, x.dtype, bias) for row in alone])
        return y.view(*x.shape[:-1], -1)

    def batch_invariant(self) -> Fp8Both:
        return self
