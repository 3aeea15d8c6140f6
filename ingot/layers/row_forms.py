"""How a product takes its input, and how what makes that input ends in that form.

Owns the forms of rows and, for each, how a norm, a norm of sums, an activation and attention end in it. Knows
no weight and no order of launches.

    form = Int8Form(static=None)
    rows, stream = form.norm(norm, hidden)

| form | what a product is given | whose products take it |
|---|---|---|
| DenseForm | [T, K] in the model's dtype | the matrix library's, the small kernels' |
| OperandForm | the same, columns in the tensor cores' order | packed products |
| Int8Form | int8 with scales per token, per head or static | int8 products |
| BlockForm | int8 by blocks of reordered channels | products by blocks |
| RawForm | the hidden states themselves: the product applies the norm | the small kernels', one token |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.kernels.activation.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.activation.silu_mul_operand import silu_mul_operand
from ingot.kernels.attention.int8_heads import int8_heads, takes_steps
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.norm.norm_kernel import Parts
from ingot.kernels.norm.post_norm import post_norm
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.rows.row_endings import Ending, InInt8, OperandOrder, Rows
from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm

AnyAttention = Attention | CrossAttention


class Form(Protocol):
    """Makes rows for one product. ``parts`` are a product's sums before they are added up."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(x + residual), x + residual), x [T, hidden_size]."""
        ...

    def post_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, post: Norm
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s), s), s = residual + post(x); RMSNorms."""
        ...

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s), s), s = sum of parts + bias + residual, rounded once."""
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
    """Rows in the model's dtype; ``overlap``: kernels start while the one before them ends; ``fused``: a
    kernel may do more than a module.
    """

    overlap: bool = False
    fused: bool = True

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the module."""
        rows, stream = norm(x, residual, overlap_tiles(x) if self.overlap else None)
        return rows, stream

    def post_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, post: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one kernel; by the modules where nothing is fused."""
        if not self.fused:
            return self.norm(norm, post(x)[0], residual)
        return post_norm(x, residual, post.weight, norm.weight, norm.eps)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one kernel."""
        return norm.of_parts(parts, residual, bias)

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
    """Hidden states before their norm, which the product applies."""

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x itself; a product that leaves a branch to be added has another form after it."""
        assert residual is None
        return x, x


class EndedForm:
    """One that norms end in within their kernel; activations and attention are each form's own."""

    ending: Ending

    def norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Form``."""
        return norm.ended(x, residual, self._tiles(norm, x), self.ending)

    def post_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, post: Norm
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Form``."""
        return post_norm(x, residual, post.weight, norm.weight, norm.eps, ending=self.ending)

    def sum_norm(
        self, norm: Norm, parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Form``."""
        return norm.of_parts(parts, residual, bias, self.ending)

    def _tiles(self, norm: Norm, x: torch.Tensor) -> Mapping[str, int] | None:
        return None


class OperandForm(EndedForm):
    """Rows in the order of columns in which tensor cores read them; steps that all decode."""

    ending = OperandOrder()

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> OperandRows:
        """In one kernel."""
        assert isinstance(mlp, GatedMLP)
        return silu_mul_operand(x, mlp.tiles.at(len(x), overlap_tiles(x)), mlp.activation)

    def attention(
        self, attention: AnyAttention, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> OperandRows:
        """Attention whose output ends so; heads are whole spans of columns."""
        return OperandRows(attention.attend(query, batch, cache, None, self.ending).flatten(1))

    def _tiles(self, norm: Norm, x: torch.Tensor) -> Mapping[str, int] | None:
        return norm.tiles.at(len(x), overlap_tiles(x))


class Int8Form(EndedForm):
    """Rows of 8 bits with a scale per token, of attention per head, or one ``static`` scale, fp32 [1]."""

    def __init__(self, static: torch.Tensor | None) -> None:
        self.static = static
        self.ending = InInt8(static)

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        """In one kernel."""
        if isinstance(mlp, MLP):
            return quantized(x, static=self.static, activation=mlp.activation)
        return silu_mul_int8(x, self.static, activation=mlp.activation)

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


class BlockForm(EndedForm):
    """Rows of few bits by blocks of columns, in the order of ``steps``."""

    def __init__(self, steps: BlockSteps) -> None:
        self.steps = self.ending = steps

    def activation(self, mlp: GatedMLP | MLP, x: torch.Tensor) -> Int8Rows:
        """In one kernel; of a plain MLP in a pass of its own."""
        if isinstance(mlp, MLP):
            return in_blocks(mlp.activate(x), self.steps)
        return silu_mul_in_blocks(x, self.steps, activation=mlp.activation)

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
