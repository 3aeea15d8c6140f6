"""Weights in 8 or 4 bits, activations in the engine's dtype: w8a16 and w4a16.

On a GPU up to ``MAX_ROWS`` rows are multiplied by the values themselves, and with activations of 16 bits up
to ``PACKED_ROWS``, on Hopper any number; otherwise the weight is widened into a temporary that the matrix
library reads. A CPU widens a piece of the weight at a time and keeps none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.product.few_rows.small_linear import small_linear
from ingot.kernels.product.invariant_linear import invariant_linear
from ingot.kernels.product.packed.packed_matmul import packed_matmul, takes_packed
from ingot.kernels.product.packed.packed_prompt import packed_prompt, takes_prompt, unpacks_prompts
from ingot.kernels.tiles.packed_tiles import MAX_SPLITS, SPLIT_OUTPUTS
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.stored_weight import (
    PIECE,
    StoredWeight,
    dequantized,
    num_rows,
    num_words,
    pack_words,
    row_pieces,
    symmetric_zero,
)
from ingot.quant.methods.gptq import gptq
from ingot.quant.methods.rounding import quantize
from ingot.quant.quantized_values import Quantized, Values
from ingot.quant.schemes.linear_scheme import LinearScheme, Tensors, WeightGrid, tensor_of


@dataclass(frozen=True)
class WeightOnly(LinearScheme):
    """W = (q - zero) · scale with q of ``bits`` bits, one scale per row (``group`` 0) or group of columns.

    Tensors: ``words`` int16 [rows, words], ``scales`` [N] or [groups, N] in the engine's dtype, ``zeros``
    uint8 of the same shape unless ``symmetric``, ``order`` int32 [K] where the values' columns are
    ``ordered`` (column j is W's column ``order[j]``: the input is gathered so before the product), ``bias``
    [N] where there is one.
    """

    bits: int = 8
    group: int = 0
    symmetric: bool = True
    ordered: bool = False

    @property
    def name(self) -> str:
        return f"w{self.bits}a16"

    @property
    def small_products(self) -> bool:
        return not self.ordered

    @property
    def grid(self) -> WeightGrid:
        return WeightGrid(self.bits, self.group, self.symmetric)

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Rows are padded to whole chunks of the kernels' layout, and to 16."""
        words = num_words(in_features, self.bits, self.group)
        shape = (-(-in_features // self.group), out_features) if self.group else (out_features,)
        tensors = {
            "words": torch.empty(num_rows(out_features), words, dtype=torch.int16),
            "scales": torch.empty(shape, dtype=dtype),
        }
        if not self.symmetric:
            tensors["zeros"] = torch.empty(shape, dtype=torch.uint8)
        if self.ordered:
            tensors["order"] = torch.empty(in_features, dtype=torch.int32)
        return tensors

    def quantize(self, weight: torch.Tensor) -> Quantized:
        """With scales of the weight's dtype."""
        return quantize(weight, self.bits, self.group, symmetric=self.symmetric, scale_dtype=weight.dtype)

    def compensated(self, weight: torch.Tensor, hessian: torch.Tensor) -> Quantized:
        """Columns by the size of their inputs, scales of the weight as it is, in 4 bits of ranges that the
        inputs weigh (gptq.py: ``act_order``, ``static_groups``, ``clip``).
        """
        return gptq(
            weight,
            hessian,
            self.bits,
            self.group,
            symmetric=self.symmetric,
            act_order=True,
            static_groups=True,
            clip=self.bits == 4,
            scale_dtype=weight.dtype,
        ).quantized

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Of values for this scheme's bits, group and symmetry; without zeros they stand around 0 as int8, or
        around 128 (8 bits) or 8 (4 bits) as uint8.
        """
        assert isinstance(found, Quantized)
        assert found.order is None or self.ordered, "the scheme has no order"
        values, middle = found.values, symmetric_zero(self.bits)
        if values.dtype == torch.int8:
            values = (values.to(torch.int16) + middle).to(torch.uint8)
        tensors = {"scales": found.scales}
        last = torch.full_like(values[:, 0], middle)
        if found.zeros is not None:
            last = found.zeros[-1] if self.group else found.zeros
            tensors["zeros"] = found.zeros
        tensors = {"words": pack_words(values, self.bits, self.group, last)} | tensors
        if self.ordered:
            by_column = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
            tensors["order"] = by_column if found.order is None else found.order
        return tensors

    def stored(self, tensors: Tensors, in_features: int) -> StoredWeight:
        parts = (tensors["scales"], tensors.get("zeros"), self.bits, self.group, tensors.get("order"))
        return StoredWeight(tensor_of(tensors, "words"), in_features, *parts)

    def unpacks_prompts(self, tensors: Tensors, in_features: int) -> bool:
        return unpacks_prompts(self.stored(tensors, in_features))

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        return dequantized(self.stored(tensors, in_features), dtype)

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        weight, x = self._aligned(x, tensors)
        bias = tensors.get("bias")
        if not runs_on_gpu(x):
            pieces = [F.linear(x, dequantized(p, x.dtype)) for p in row_pieces(weight, PIECE)]
            y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
            return y if bias is None else y + bias
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= MAX_ROWS:
            return small_linear(rows, weight, bias).view(*x.shape[:-1], -1)
        if takes_packed(rows.shape[0], x.dtype):
            return packed_matmul(rows, weight, bias).view(*x.shape[:-1], -1)
        if takes_prompt(rows, weight):
            return packed_prompt(rows, weight, bias).view(*x.shape[:-1], -1)
        return F.linear(x, dequantize(weight, x.dtype), bias)

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """On a GPU of up to ``PACKED_ROWS`` rows no widened weight, but at most ``MAX_SPLITS`` parts of the
        sums and the sums themselves, in fp32. For more a widened weight is counted on any GPU: a smaller one
        may run the same engine, and not every shape is unpacked.
        """
        if not kernels or not (tokens <= MAX_ROWS or takes_packed(tokens, dtype)):
            return super().workspace_bytes(out_features, in_features, tokens, dtype, kernels=kernels)
        return (MAX_SPLITS + 1) * tokens * out_features * 4 if out_features <= SPLIT_OUTPUTS else 0

    def _aligned(self, x: torch.Tensor, tensors: Tensors) -> tuple[StoredWeight, torch.Tensor]:
        """The weight as it is stored and the input with its columns in the same order."""
        weight = self.stored(tensors, x.shape[-1])
        if weight.order is None:
            return weight, x
        return replace(weight, order=None), x.index_select(-1, weight.order)

    def batch_invariant(self) -> InvariantWeightOnly:
        return InvariantWeightOnly(self.bits, self.group, self.symmetric, self.ordered)


class InvariantWeightOnly(WeightOnly):
    """Every weight is widened into a temporary, in every step, for the invariant product: right and slow."""

    small_products = False

    def unpacks_prompts(self, tensors: Tensors, in_features: int) -> bool:
        return False

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """The widened weight, whatever the rows."""
        return LinearScheme.workspace_bytes(self, out_features, in_features, tokens, dtype, kernels=kernels)

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        weight, x = self._aligned(x, tensors)
        return invariant_linear(x, dequantize(weight, x.dtype), tensors.get("bias"))

    def batch_invariant(self) -> InvariantWeightOnly:
        return self
