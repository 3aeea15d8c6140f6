"""How a product takes its input, and how what computes that input ends in that form.

    form = Int8Form(static=None)
    rows, hidden = form.norm(norm, hidden)

| form | what a product is given | products |
|---|---|---|
| DenseForm | [T, K] in the model's dtype | the matrix library's, the small kernels' |
| OperandForm | the same, columns in the tensor cores' order | packed products |
| Int8Form | int8 or e4m3 with scales per token, group, head or static | int8 and fp8 products |
| BlockForm | int8 by blocks of reordered channels | products by blocks |
| RawForm | the hidden states: the product applies the norm | the small kernels', one token |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation.gated_mlp import silu_mul_operand
from ingot.kernels.activation.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.norm.norm_kernel import Parts
from ingot.kernels.norm.post_norm import post_norm
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending, InInt8, OperandOrder, Rows
from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm

AnyAttention = Attention | CrossAttention


class Form:
    """Makes rows for one product; norms end in ``ending``, ``parts`` are a product's partial sums.

    No ABC: each product of a step asks for its form's class, which takes an ABC four times as long.
    """

    ending: Ending

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(x + residual), x + residual), x [T, hidden_size]."""
        return norm.ended(x, residual, None, self.ending)

    def post_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, post: Norm
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s), s), s = residual + post(x); RMSNorms."""
        return post_norm(x, residual, post.weight, norm.weight, norm.eps, ending=self.ending)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s), s), s = sum of parts + bias + residual, rounded once."""
        return norm.of_parts(parts, residual, bias, self.ending)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Rows:
        """The activation of a gate and up product's output."""
        raise NotImplementedError

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Rows:
        """Attention of queries [T, num_heads, head_dim], as rows of num_heads * head_dim."""
        raise NotImplementedError


class DenseForm(Form):
    """Rows in the model's dtype; ``overlap``: start early; ``fused``: a kernel may do more than a module."""

    ending = AS_THEY_ARE

    def __init__(self, overlap: bool = False, fused: bool = True) -> None:
        self.overlap, self.fused = overlap, fused

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        rows, hidden = norm(x, residual, overlap_tiles(x) if self.overlap else None)
        return rows, hidden

    def post_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, post: Norm
    ) -> tuple[Rows, torch.Tensor]:
        """In one kernel; if not ``fused`` by the modules."""
        if not self.fused:
            return self.norm(norm, post(x)[0], residual)
        return super().post_norm(norm, x, residual, post)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> torch.Tensor:
        return mlp.activate(x, overlap_tiles(x) if self.overlap else None)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> torch.Tensor:
        return attention.attend(query, batch, cache).flatten(1)


class RawForm(DenseForm):
    """Hidden states, whose norm the product applies."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        assert residual is None
        return x, x


class OperandForm(Form):
    """Rows with columns in the order in which tensor cores read them; for steps that decode."""

    ending = OperandOrder()

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        return norm.ended(x, residual, norm.tiles.at(len(x), overlap_tiles(x)), self.ending)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> OperandRows:
        assert isinstance(mlp, GatedMLP)
        return silu_mul_operand(x, mlp.tiles.at(len(x), overlap_tiles(x)), mlp.activation)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> OperandRows:
        """As of ``Form``; heads are whole spans of columns."""
        return OperandRows(attention.attend(query, batch, cache, None, self.ending).flatten(1))


class Int8Form(Form):
    """Rows in 8 bits with a scale per token, of attention also ``by_head``, or per ``group`` of a token's
    columns, or one ``static`` scale, fp32 [1]; ``dtype`` is int8 or e4m3.
    """

    def __init__(
        self,
        static: torch.Tensor | None,
        dtype: torch.dtype = torch.int8,
        *,
        by_head: bool = True,
        group: int = 0,
    ) -> None:
        self.static, self.dtype, self.by_head = static, dtype, by_head or static is not None
        self.group = group
        self.ending = InInt8(static, dtype, group)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        if isinstance(mlp, MLP):
            return quantized(x, self.group, self.static, activation=mlp.activation, dtype=self.dtype)
        return silu_mul_int8(x, self.static, activation=mlp.activation, dtype=self.dtype, group=self.group)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Int8Rows:
        """As of ``Form``; scales per token or group are found by a separate kernel."""
        if not self.by_head:
            return quantized(attention.attend(query, batch, cache).flatten(1), self.group, dtype=self.dtype)
        out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
        scales = self.static
        if scales is None:
            scales = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        attention.attend(query, batch, cache, out, scales)
        return int8_heads(out, scales)


class BlockForm(Form):
    """Rows of few bits by blocks of columns, in the order of ``steps``."""

    def __init__(self, steps: BlockSteps) -> None:
        self.steps = self.ending = steps

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        """In one kernel; of a plain MLP in a separate pass."""
        if isinstance(mlp, MLP):
            return in_blocks(mlp.activate(x), self.steps)
        return silu_mul_in_blocks(x, self.steps, activation=mlp.activation)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Int8Rows:
        """As of ``Form``; in a separate pass unless blocks fill the rows."""
        if not self.steps.fill(query.shape[1] * query.shape[2]):
            return in_blocks(attention.attend(query, batch, cache).flatten(1), self.steps)
        out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
        return int8_heads(attention.attend(query, batch, cache, out, self.steps), self.steps)


def overlap_tiles(x: torch.Tensor) -> Mapping[str, int]:
    """Tiles of a kernel that reads ``x`` and starts early, if the GPU can."""
    return {"OVERLAP": 2} if overlaps(x.device) else {}
