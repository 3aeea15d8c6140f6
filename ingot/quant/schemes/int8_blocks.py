"""RPTQ's linear layers: weights in 8 or 4 bits, activations in 8 or 4 bits with a scale for each block.

The rule that rounds activations is kernels/rows/block_rows.py, the mathematics quant/methods/rptq.py; the
build chooses orders.

Values are stored one per byte, of 4 bits too, and the products are those of 8 bits. Sums of a block are
exact, and blocks are added up in one order, so that a row's outputs depend on that row alone: the scheme is
its own batch-invariant form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingot.config.quantization.rptq_options import RANGES
from ingot.errors import BuildError
from ingot.kernels.activation.silu_mul_blocks import in_blocks
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.quant.methods.activation_statistics import InputStatistics
from ingot.quant.methods.channel_clusters import block_lengths, block_ranges
from ingot.quant.methods.gptq import gptq
from ingot.quant.methods.rounding import quantize
from ingot.quant.methods.rptq import averaged_ranges, narrowed, scales_of, two_levels
from ingot.quant.plain_rows import rounded_blocks
from ingot.quant.quantized_values import InBlocks, Values
from ingot.quant.schemes.int8_products import Int8Products
from ingot.quant.schemes.linear_scheme import BlockTensors, InputForm, Tensors, tensor_of

_INPUT_PEAK = 4.0  # of inputs that random scales are for
_VALUES_STD = 73.6  # of int8 values from -127 to 127, each as likely


@dataclass(frozen=True)
class Int8Blocks(Int8Products):
    """W = q · scale, columns by ``order``; x = (q - zero) · step, by blocks of columns in the same order.

    Tensors: ``weight`` int8 [N, K padded with zeros to whole blocks], ``scales`` fp32 [N], ``steps`` (the
    input's scales) and ``zeros`` fp32 [blocks], ``shift`` fp32 [N]: what zeros add to the outputs, with the
    bias; where ``ordered`` also ``order`` int32 [K]; ``bias`` [N] where there is one, as it was.

    Attributes:
        weight_bits: 4: a weight is a value of 4 bits times a whole factor of its block, up to 15.
        input_bits: of activations.
        block: columns of a block.
        ordered: the input's channels come in the model's order; else in the stored one, which was given to
            the product that makes them.
    """

    weight_bits: int
    input_bits: int
    block: int
    ordered: bool = False
    form: ClassVar[InputForm] = "blocks"
    fixed: ClassVar[frozenset[str]] = frozenset({"scales", "steps", "zeros", "shift"})
    by_place: ClassVar[bool] = True
    packs_fp32: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"rptq-w{self.weight_bits}a{self.input_bits}"

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        blocks = -(-in_features // self.block)
        tensors = {
            "weight": torch.empty(out_features, blocks * self.block, dtype=torch.int8),
            "scales": torch.empty(out_features, dtype=torch.float32),
            "steps": torch.empty(blocks, dtype=torch.float32),
            "zeros": torch.empty(blocks, dtype=torch.float32),
            "shift": torch.empty(out_features, dtype=torch.float32),
        }
        return tensors | ({"order": torch.empty(in_features, dtype=torch.int32)} if self.ordered else {})

    def quantize(self, weight: torch.Tensor) -> Values:
        """Always BuildError: nothing is stored without samples."""
        raise BuildError("RPTQ needs calibration data", seen="none", fix="`calib=FILE`")

    def chosen(
        self,
        weight: torch.Tensor,
        seen: InputStatistics,
        order: torch.Tensor,
        *,
        ranges: str = RANGES[0],
        one_scale: bool = False,
        rounds: bool = False,
    ) -> InBlocks:
        """The values of a weight [N, K], and the scales of its input in blocks.

        Args:
            weight: its columns by the input's channels as they come: in the stored order unless ``ordered``.
            seen: of the input in the model's order, with a Hessian, records and a sample.
            order: int64 [K], the channel that comes to each place.
            ranges: how they are measured, as in ``RptqConfig``.
            one_scale: all blocks have that of the whole input.
            rounds: values of the weight are the nearest, instead of GPTQ's.
        """
        assert seen.hessian is not None
        columns = weight[:, order] if self.ordered else weight
        low, high = self._ranges(columns, seen, order, ranges, one_scale)
        input_scales, input_zeros = scales_of(low, high, self.input_bits)
        hessian = seen.hessian.mean()[order][:, order]
        values, scales = self._weight_values(columns.float(), hessian, rounds)
        return InBlocks(values, scales, input_scales, input_zeros, order if self.ordered else None)

    def cost(
        self, weight: torch.Tensor, seen: InputStatistics, order: torch.Tensor, ranges: str = RANGES[0]
    ) -> float:
        """Squared error of a sample's outputs with its input in an order; ``weight`` is in the model's."""
        assert seen.sample is not None
        columns, x = weight[:, order].float(), seen.sample.x[:, order]
        low, high = self._ranges(columns, seen, order, ranges, one_scale=False)
        scales, zeros = scales_of(low, high, self.input_bits)
        error = rounded_blocks(x, scales, zeros, self.block, self.input_bits) - x
        return float((error @ columns.T).square().sum())

    def _ranges(
        self, columns: torch.Tensor, seen: InputStatistics, order: torch.Tensor, ranges: str, one_scale: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(lowest, highest) [blocks] of the ordered input that a weight [N, K] reads."""
        width, block = len(order), len(order) if one_scale else self.block
        lengths = block_lengths(width, block)
        if ranges == "ema-minmax":
            assert seen.records is not None
            lowest, highest = (part[:, order] for part in (seen.records.lowest, seen.records.highest))
            low, high = averaged_ranges(lowest, highest, lengths)
        else:
            low, high = block_ranges(seen.ranges.lowest[order], seen.ranges.highest[order], lengths)
        if ranges == "mse":
            assert seen.sample is not None
            importance = columns.float().square().sum(0)
            low, high = narrowed(low, high, seen.sample.x[:, order], block, self.input_bits, importance)
        blocks = -(-width // self.block)
        return (low.expand(blocks), high.expand(blocks)) if one_scale else (low, high)

    def _weight_values(
        self, weight: torch.Tensor, hessian: torch.Tensor, rounds: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [N, K] and fp32 [N] of a weight fp32 [N, K] in the stored order."""
        solve = partial(gptq, weight, hessian, act_order=True, scale_dtype=torch.float32)
        if self.weight_bits == 8:
            if rounds:
                found = quantize(weight, 8, scale_dtype=torch.float32)
            else:
                found = solve(8, static_groups=True).quantized
            return found.values, found.scales
        levels = two_levels(weight, self.block, hessian.diagonal())
        if rounds:
            values = levels.nearest(weight, self.block)
        else:
            values = solve(4, self.block, grid=levels.grid).quantized.values
        return levels.wide_values(values, self.block), levels.rows

    def drawn(self, out_features: int, in_features: int, std: float, generator: torch.Generator) -> InBlocks:
        """Any of the values that there are, and scales for inputs from -4 to 4."""
        device = generator.device
        values = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        values.random_(-127, 128, generator=generator)
        blocks = -(-in_features // self.block)
        input_scales = torch.full((blocks,), 2 * _INPUT_PEAK / 2**self.input_bits, device=device)
        order = torch.randperm(in_features, generator=generator, device=device)
        scales = torch.full((out_features,), std / _VALUES_STD, device=device)
        kept = order if self.ordered else None
        return InBlocks(values, scales, input_scales, torch.zeros_like(input_scales), kept)

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        assert isinstance(found, InBlocks)
        assert (found.order is not None) == self.ordered
        padding = -found.values.shape[1] % self.block
        shift = found.shift(self.block)
        tensors = {
            "weight": F.pad(found.values, (0, padding)),
            "scales": found.scales.float(),
            "steps": found.input_scales.float(),
            "zeros": found.input_zeros.float(),
            "shift": (shift if bias is None else shift + bias.to(shift)).float(),
        }
        return tensors | ({} if found.order is None else {"order": found.order.int()})

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        return Int8Weight(tensor_of(tensors, "weight"), tensor_of(tensors, "scales"))

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        # Without the last block's padding.
        return Int8Weight(tensor_of(tensors, "weight")[:, :in_features], tensor_of(tensors, "scales"))

    def gathered(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return x[:, self._order(tensors, x.device)] if self.ordered else x

    def steps(self, tensors: Tensors) -> BlockSteps:
        order = tensor_of(tensors, "order") if self.ordered else None
        scales, zeros = tensor_of(tensors, "steps"), tensor_of(tensors, "zeros")
        return BlockSteps(scales, zeros, self.block, self.input_bits, order)

    def block_tensors(self, tensors: Tensors) -> BlockTensors:
        return BlockTensors(self.steps(tensors), self.int8_weight(tensors, 0), tensor_of(tensors, "shift"))

    def _added(self, tensors: Tensors) -> torch.Tensor:
        return tensor_of(tensors, "shift")

    def rounded(self, x: torch.Tensor, tensors: Tensors, *, flips: bool = False) -> torch.Tensor:
        """As of ``LinearScheme``, in the input's own order."""
        order = self._order(tensors, x.device) if self.ordered else None
        scales, zeros = tensor_of(tensors, "steps"), tensor_of(tensors, "zeros")
        return rounded_blocks(x, scales, zeros, self.block, self.input_bits, order, flips=flips)

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Columns as the input's channels come."""
        values = super().dequantize(tensors, in_features, dtype)
        if not self.ordered:
            return values
        return torch.empty_like(values).index_copy_(1, self._order(tensors, values.device), values)

    def quantize_input(self, x: torch.Tensor, tensors: Tensors) -> Int8Rows:
        return in_blocks(x, self.steps(tensors))

    def dequantize_input(
        self, rows: Int8Rows, tensors: Tensors, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of ``LinearScheme``; scales are [K]."""
        columns = like.shape[1]  # the last block may be filled up
        scales, zeros = (
            tensor_of(tensors, name).to(like).repeat_interleave(self.block) for name in ("steps", "zeros")
        )
        values, scales = ((rows.values.to(like) - zeros) * scales)[:, :columns], scales[:columns]
        if not self.ordered:
            return values, scales
        order = self._order(tensors, like.device)
        placed = torch.empty_like(values).index_copy_(1, order, values)
        return placed, torch.empty_like(scales).index_copy_(0, order, scales)

    def _input_bytes(self, in_features: int, tokens: int) -> int:
        return tokens * -(-in_features // self.block) * self.block

    def _order(self, tensors: Tensors, device: torch.device) -> torch.Tensor:
        return tensor_of(tensors, "order").to(device).long()
