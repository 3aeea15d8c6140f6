"""How a product takes its input, and how what makes that input ends in that form.

Owns the forms of rows and, for each, how a norm, a norm of sums, an activation and attention end in it. Knows
no weight and no order of launches.

    form = Int8Form(static=None)
    rows, stream = form.norm(norm, hidden)

| form | what a product is given | whose products take it |
|---|---|---|
| DenseForm | [T, K] in the model's dtype | the matrix library's, the small kernels' |
| OperandForm | the same, columns in the tensor cores' order | packed products |
| Int8Form | int8 with scales per token, per head or static | w8a8, w4a8 |
| BlockForm | int8 by blocks of reordered channels | RPTQ |
| RawForm | the hidden states themselves: the product applies the norm | the small kernels', one token |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.kernels.activation.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.activation.silu_mul_int8 import silu_mul_int8
from ingot.kernels.attention.int8_heads import int8_heads, takes_steps
from ingot.kernels.norm.norm_blocks import rms_norm_in_blocks
from ingot.kernels.norm.norm_int8 import rms_norm_int8
from ingot.kernels.norm.operand_ends import rms_norm_operand, silu_mul_operand, sum_norm_operand
from ingot.kernels.norm.sum_norm import Parts, sum_norm, sum_norm_int8
from ingot.kernels.norm.sum_norm_blocks import sum_norm_in_blocks
from ingot.kernels.overlap import overlaps
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandOrder, OperandRows
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import LayerNorm, RMSNorm

Rows = torch.Tensor | OperandRows | Int8Rows
Norm = RMSNorm | LayerNorm
AnyAttention = Attention | CrossAttention


class Form(Protocol):
    """Makes rows for one product. ``parts`` are a product's sums before they are added up."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(x + residual), x + residual), x [T, hidden_size]."""
        ...

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s), s), s = sum of parts + bias + residual, rounded once; an RMSNorm."""
        ...

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Rows:
        """The activation of a finished gate and up product."""
        ...

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Rows:
        """Attention of queries [T, num_heads, head_dim], as rows of num_heads * head_dim."""
        ...


@dataclass(frozen=True)
class DenseForm:
    """Rows in the model's dtype; ``overlap``: kernels start while the one before them ends."""

    overlap: bool = False

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the module."""
        rows, stream = norm(x, residual, overlap_tiles(x) if self.overlap else None)
        return rows, stream

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one kernel."""
        return sum_norm(parts, residual, norm.weight, norm.eps, bias)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> torch.Tensor:
        """By the module."""
        return mlp.activate(x, overlap_tiles(x) if self.overlap else None)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> torch.Tensor:
        """Attention as it is."""
        return attention.attend(query, batch, cache).flatten(1)


@dataclass(frozen=True)
class RawForm(DenseForm):
    """Hidden states that nobody has normalised: the product that takes them does."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x itself; a product that leaves a branch to be added has another form after it."""
        assert residual is None
        return x, x


class OperandForm:
    """Rows in the order of columns in which tensor cores read them; steps that all decode."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[OperandRows, torch.Tensor]:
        """In one kernel."""
        tiles = norm.tiles.at(len(x), overlap_tiles(x))
        return rms_norm_operand(x, norm.weight, norm.eps, residual, tiles)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[OperandRows, torch.Tensor]:
        """In one kernel."""
        return sum_norm_operand(parts, residual, norm.weight, norm.eps, bias)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> OperandRows:
        """In one kernel."""
        assert isinstance(mlp, GatedMLP)
        return silu_mul_operand(x, mlp.tiles.at(len(x), overlap_tiles(x)))

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> OperandRows:
        """Attention whose output ends so; heads are whole spans of columns."""
        return OperandRows(attention.attend(query, batch, cache, None, OperandOrder()).flatten(1))


@dataclass(frozen=True)
class Int8Form:
    """Rows of 8 bits with a scale per token, of attention per head, or one ``static`` scale, fp32 [1]."""

    static: torch.Tensor | None

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Int8Rows, torch.Tensor]:
        """In one kernel."""
        return rms_norm_int8(x, norm.weight, norm.eps, residual, self.static)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Int8Rows, torch.Tensor]:
        """In one kernel."""
        return sum_norm_int8(parts, residual, norm.weight, norm.eps, bias, self.static)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        """In one kernel."""
        return silu_mul_int8(x, self.static)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Int8Rows:
        """Attention whose output ends so."""
        out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
        scales = self.static
        if scales is None:
            scales = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        attention.attend(query, batch, cache, out, scales)
        return int8_heads(out, scales)


@dataclass(frozen=True)
class BlockForm:
    """Rows of few bits by blocks of columns, in the order of ``steps``."""

    steps: BlockSteps

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Int8Rows, torch.Tensor]:
        """In one kernel."""
        return rms_norm_in_blocks(x, norm.weight, norm.eps, self.steps, residual)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Int8Rows, torch.Tensor]:
        """In one kernel; sums of int8 rows that have no groups are added up before."""
        if isinstance(parts, torch.Tensor):
            return sum_norm_in_blocks(parts, residual, norm.weight, norm.eps, self.steps, bias)
        _, stream = sum_norm(parts, residual, norm.weight, norm.eps, bias)
        return self.norm(norm, stream)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        """In one kernel."""
        return silu_mul_in_blocks(x, self.steps)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Int8Rows:
        """Attention whose output ends so; heads that do not fill whole blocks are quantized in a pass of
        their own.
        """
        if not takes_steps(self.steps, query.shape[1] * query.shape[2]):
            return in_blocks(attention.attend(query, batch, cache).flatten(1), self.steps)
        out = torch.empty(query.shape, dtype=torch.int8, device=query.device)
        return int8_heads(attention.attend(query, batch, cache, out, self.steps), self.steps)


def overlap_tiles(x: torch.Tensor) -> Mapping[str, int]:
    """Tiles of a kernel that reads ``x`` and starts early, where the GPU can."""
    return {"OVERLAP": 2} if overlaps(x.device) else {}
