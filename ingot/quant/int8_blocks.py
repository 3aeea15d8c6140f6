"""RPTQ's linear layers: weights in 8 or 4 bits, activations in 8 or 4 bits with a step for each block.

Owns what the schemes store and how they multiply. The rule that rounds activations is
kernels/rows/block_rows.py; orders, steps and numbers are chosen by quant/rptq.py and the engine. Knows no
model.

    scheme = Int8Blocks(weight_bits=4, input_bits=8, block=128, ordered=True)
    y = scheme.apply(x, scheme.accept(found, bias))

Numbers lie one to a byte, of 4 bits too, and the products are those of 8 bits. Sums of a block are exact, and
blocks are added up in one order, so that a row's outputs depend on that row alone: the scheme is its own
batch-invariant form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingot.errors import BuildError
from ingot.kernels.activation.silu_mul_blocks import in_blocks
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.quant.activations import Tensors, integer_bytes
from ingot.quant.int8_products import multiply
from ingot.quant.plain_rows import rounded_blocks
from ingot.quant.rounding import Quantized
from ingot.quant.rptq import InBlocks


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A layer as its product reads it: the input's steps, the weight [N, whole blocks], the shift [N]."""

    steps: BlockSteps
    weight: Int8Weight
    shift: torch.Tensor


@dataclass(frozen=True)
class Int8Blocks:
    """W = q · scale, columns by ``order``; x = (q - zero) · step, by blocks of columns in the same order.

    Tensors: ``weight`` int8 [N, K padded with zeros to whole blocks], ``scales`` fp32 [N], ``steps`` and
    ``zeros`` fp32 [blocks], ``shift`` fp32 [N]: what zeros add to the outputs, with the bias; where
    ``ordered`` also ``order`` int32 [K]; ``bias`` [N] where there is one, as it was.

    Attributes:
        weight_bits: 4: a weight is a number of 4 bits times a whole factor of its block, up to 15.
        input_bits: of activations.
        block: columns of a block.
        ordered: the input's channels come in the model's order; else in the stored one, which was given to
            the product that makes them.
    """

    weight_bits: int
    input_bits: int
    block: int
    ordered: bool
    fixed: ClassVar[frozenset[str]] = frozenset({"scales", "steps", "zeros", "shift"})
    rounds: ClassVar[bool] = True
    by_place: ClassVar[bool] = True
    packs_fp32: ClassVar[bool] = False
    cancels: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """As in ``QuantConfig``."""
        return f"rptq-w{self.weight_bits}a{self.input_bits}"

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Empty tensors."""
        blocks = -(-in_features // self.block)
        tensors = {
            "weight": torch.empty(out_features, blocks * self.block, dtype=torch.int8),
            "scales": torch.empty(out_features, dtype=torch.float32),
            "steps": torch.empty(blocks, dtype=torch.float32),
            "zeros": torch.empty(blocks, dtype=torch.float32),
            "shift": torch.empty(out_features, dtype=torch.float32),
        }
        if self.ordered:
            tensors["order"] = torch.empty(in_features, dtype=torch.int32)
        if bias:
            tensors["bias"] = torch.empty(out_features, dtype=dtype)
        return tensors

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Nothing is stored without samples.

        Raises:
            BuildError: always.
        """
        raise BuildError("RPTQ needs calibration data", seen="none", fix="--calib FILE")

    def accept(
        self,
        found: Quantized | InBlocks,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The stored form of numbers, in the order of ``layout``."""
        assert isinstance(found, InBlocks)
        assert (found.order is not None) == self.ordered
        padding = -found.numbers.shape[1] % self.block
        shift = found.shift(self.block)
        tensors = {
            "weight": F.pad(found.numbers, (0, padding)),
            "scales": found.scales.float(),
            "steps": found.steps.float(),
            "zeros": found.zeros.float(),
            "shift": (shift if bias is None else shift + bias.to(shift)).float(),
        }
        if found.order is not None:
            tensors["order"] = found.order.int()
        return tensors if bias is None else tensors | {"bias": bias}

    def int8_weight(self, tensors: Tensors) -> Int8Weight:
        """What int8 products multiply by: ``values`` [N, whole blocks], columns in the stored order."""
        return Int8Weight(_of(tensors, "weight"), _of(tensors, "scales"))

    def steps(self, tensors: Tensors) -> BlockSteps:
        """How an input becomes numbers."""
        order = _of(tensors, "order") if self.ordered else None
        return BlockSteps(_of(tensors, "steps"), _of(tensors, "zeros"), self.block, self.input_bits, order)

    def product(self, tensors: Tensors) -> BlockProduct:
        """Views of the tensors."""
        return BlockProduct(self.steps(tensors), self.int8_weight(tensors), _of(tensors, "shift"))

    def rounded(self, x: torch.Tensor, tensors: Tensors, *, flips: bool = False) -> torch.Tensor:
        """What an input [..., K] means as numbers, in its order and dtype, without a kernel; ``flips`` as in
        ``rounded_blocks``.
        """
        order = _of(tensors, "order").to(x.device).long() if self.ordered else None
        return rounded_blocks(
            x, _of(tensors, "steps"), _of(tensors, "zeros"), self.block, self.input_bits, order, flips=flips
        )

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """W [N, K] by plain PyTorch, its columns as the input's channels come."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = _of(tensors, "weight")[:, :in_features].to(wide) * _of(tensors, "scales").to(wide)[:, None]
        if self.ordered:
            order = _of(tensors, "order").to(values.device).long()
            values = torch.empty_like(values).index_copy_(1, order, values)
        return values.to(dtype)

    def quantize_input(self, x: torch.Tensor, tensors: Tensors) -> Int8Rows:
        """Activations [M, K] as numbers."""
        return in_blocks(x, self.steps(tensors))

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x · Wᵀ + b for x [..., K]."""
        own = self.product(tensors)
        rows = self.quantize_input(x.reshape(-1, x.shape[-1]), tensors)
        y = multiply(rows, own.weight, x.dtype, own.shift)
        return y.view(*x.shape[:-1], -1)

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """Of the input in whole blocks."""
        own = tokens * -(-in_features // self.block) * self.block
        return integer_bytes(own, out_features, in_features, tokens, kernels=kernels)

    def batch_invariant(self) -> Int8Blocks:
        """Itself."""
        return self


def _of(tensors: Tensors, name: str) -> torch.Tensor:
    tensor = tensors[name]
    assert tensor is not None
    return tensor
