"""A linear layer's product, by the kernel that its scheme and the number of rows call for.

Owns what each kind of product takes (its form), and how its result goes on: whole, into queries and the
cache, into an activation, or into the hidden states, also with the next norm. product_choice.py chooses the
product of a step.

    rows, hidden = product.join(rows, hidden, next_norm, next_product.form)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.kernels.activation.plain_activation import Plain
from ingot.kernels.cache.rope_kv_write import QkvParts
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.product.few_rows.small_qkv import small_int8_qkv, small_qkv
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.tiles.packed_tiles import packed_splits
from ingot.kernels.weight.int4_weight import AnyInt8
from ingot.layers.attention import Attention
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.row_forms import (
    BlockForm,
    DenseForm,
    Form,
    Int8Form,
    OperandForm,
    RawForm,
    Rows,
    overlap_tiles,
)


@dataclass(frozen=True)
class LayerProducts:
    """A layer's products in one kind of step, and what comes after them.

    Attributes:
        next_norm: of the next layer, or the final one.
        after: the product after it: the next layer's QKV, or the head.
        encoded: cross-attention's query and output, in a layer that has it.
    """

    qkv: Product
    output: Product
    up: Product
    down: Product
    next_norm: Norm
    after: Product
    encoded: tuple[Product, Product] | None = None


class Product:
    """The module itself, which multiplies as its scheme does; its hooks fire.

    Attributes:
        form: how it takes its input; not ``fused``: only as modules make it.
        overlap: whether the kernel after it starts while it ends.
    """

    form: Form

    def __init__(self, linear: Linear, *, overlap: bool = False, fused: bool = True) -> None:
        self.linear = linear
        self.overlap = overlap
        self.form = DenseForm(overlap, fused)

    @property
    def bias(self) -> torch.Tensor | None:
        """[out_features], or None."""
        return self.linear._parameters.get("bias")

    def taken(self, x: torch.Tensor) -> Rows:
        """x [T, in_features] in the product's form, by a kernel of its own."""
        return x

    def whole(self, x: Rows) -> torch.Tensor:
        """x · Wᵀ + b: [T, out_features]."""
        y: torch.Tensor = self.linear(_dense(x))
        return y

    def added(self, x: Rows, hidden: torch.Tensor) -> torch.Tensor:
        """hidden + x · Wᵀ + b; ``hidden`` [T, out_features] may be written over."""
        return hidden + self.whole(x)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries [T, num_heads, head_dim] of a QKV product; keys and values go into the cache."""
        tiles = overlap_tiles(cache.keys) if self.overlap else None
        return attention.place(self.whole(x), batch, cache, rope, tiles)

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        """A gate and up product with its activation, in the ``form`` of the down product."""
        return form.activation(mlp, self.whole(x))

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s) in a ``form``, s), s = hidden + x · Wᵀ + b, or hidden + post(x · Wᵀ + b); ``hidden``
        [T, hidden_size] may be written over.
        """
        if post is not None:
            return form.post_norm(norm, self.whole(x), hidden, post)
        return form.norm(norm, self.whole(x), hidden)


class SkippingProduct(Product):
    """A product that adds nothing to the rows of ``skipped`` [T], not even its bias."""

    def __init__(self, product: Product, skipped: torch.Tensor) -> None:
        super().__init__(product.linear, overlap=product.overlap)
        self.form = product.form
        self.product = product
        self.skipped = skipped

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``; there is no ``post``."""
        assert post is None
        return form.norm(norm, self.product.whole(x).masked_fill(self.skipped[:, None], 0), hidden)


class AddedProduct(Product):
    """A dense one without a bias that the matrix library adds to the hidden states in place."""

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        weight = self.linear.weight
        assert isinstance(weight, torch.Tensor)
        return form.norm(norm, hidden.addmm_(_dense(x), weight.t()))


class SmallProduct(Product):
    """Up to 64 rows by kernels that read the weight as it is stored, dense or in fewer bits.

    Args:
        norm: of a product in the raw form, which applies it.
        places: whether queries, keys and values are placed by the product's own kernel.
        gates: whether gate, up and the gate's activation are one kernel.
        sums: whether the next norm adds up its partial sums; else it adds the hidden states itself.
    """

    def __init__(
        self,
        linear: Linear,
        *,
        overlap: bool = False,
        norm: Norm | None = None,
        places: bool = False,
        gates: bool = False,
        sums: bool = False,
    ) -> None:
        super().__init__(linear, overlap=overlap)
        self.norm, self.places, self.gates, self.sums = norm, places, gates, sums
        if norm is not None:
            self.form = RawForm()

    @property
    def _norm(self) -> tuple[torch.Tensor | None, float]:
        return (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    def whole(self, x: Rows) -> torch.Tensor:
        """As of ``Product``."""
        return self._product(_dense(x), None, *self._norm)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """As of ``Product``; with rotary and cache write in one kernel where it ``places``."""
        if not self.places:
            return super().heads(x, attention, batch, cache, rope)
        rows, place = _dense(x), attention.placement(batch, cache, rope)
        tiles = attention.small_tiles.at(len(rows))
        query = small_qkv(rows, self.linear.stored(), self.bias, *self._norm, place, tiles)
        batch.see("query", query)
        return query

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        """As of ``Product``; one kernel where it ``gates`` or an MLP is plain, for a dense down product."""
        rows = _dense(x)
        if not isinstance(form, DenseForm) or (isinstance(mlp, GatedMLP) and not self.gates):
            return super().inner(x, mlp, form)
        if isinstance(mlp, MLP):
            return self._product(rows, None, *self._norm, mlp.activation)
        return small_gate_up(rows, self.linear.stored(), *self._norm, tiles=mlp.small_tiles.at(len(rows)))

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        rows = _dense(x)
        if self.sums:
            return form.sum_norm(norm, small_linear_parts(rows, self.linear.stored()), hidden, self.bias)
        return form.norm(norm, self._product(rows, hidden, None, 0.0))

    def _product(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor | None,
        eps: float,
        activation: Plain | None = None,
    ) -> torch.Tensor:
        """linear(norm(x)) + residual, or its activation."""
        tiles = self.linear.small_tiles.at(len(x))
        return small_linear(x, self.linear.stored(), self.bias, residual, norm, eps, tiles, activation)


class PackedProduct(Product):
    """Up to 256 rows by a weight of fewer bits, unpacked on the way to the tensor cores.

    Args:
        ordered: whether its tiles take their rows in the operand's order.
    """

    def __init__(self, linear: Linear, *, overlap: bool, ordered: bool) -> None:
        super().__init__(linear, overlap=overlap)
        if ordered:
            self.form = OperandForm()

    def whole(self, x: Rows) -> torch.Tensor:
        """As of ``Product``."""
        return packed_matmul(_wide(x), self.linear.stored(), self.bias)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """As of ``Product``, from parts where that is faster."""
        weight, norm = self.linear.stored(), attention.qkv_proj.stored().scales
        rows, ordered = len(batch.positions), isinstance(x, OperandRows)
        assert norm is not None
        if packed_splits(rows, weight, norm.device, ordered) == 1:
            return super().heads(x, attention, batch, cache, rope)
        parts = QkvParts(packed_matmul_parts(_wide(x), weight), self.bias, norm.dtype)
        return attention.place(parts, batch, cache, rope, overlap_tiles(cache.keys))

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        return form.sum_norm(norm, packed_matmul_parts(_wide(x), self.linear.stored()), hidden, self.bias)


class Int8Product(Product):
    """Both sides in 8 bits.

    Args:
        dtype: of its result.
        splits: whether the next norm adds up its partial sums; else it adds to the hidden states in place.
        places: whether queries, keys and values are placed by the product's own kernel.
    """

    def __init__(
        self, linear: Linear, dtype: torch.dtype, *, overlap: bool, splits: bool, places: bool = False
    ) -> None:
        super().__init__(linear, overlap=overlap)
        self.dtype, self.splits, self.places = dtype, splits, places
        self.form = Int8Form(linear._parameters.get("input_scale"))

    def weight(self, rows: int) -> AnyInt8:
        """For so many rows."""
        return self.linear.int8_weight(rows)

    def whole(self, x: Rows) -> torch.Tensor:
        """As of ``Product``."""
        rows = _int8(x)
        return int8_linear(rows, self.weight(len(rows.values)), self.dtype, self.bias)

    def taken(self, x: torch.Tensor) -> Int8Rows:
        """As of ``Product``."""
        return self.linear.scheme.quantize_input(x, self.linear._parameters)

    def added(self, x: Rows, hidden: torch.Tensor) -> torch.Tensor:
        """As of ``Product``, rounded once."""
        rows, weight = _int8(x), self.weight(len(hidden))
        return int8_linear(rows, weight, self.dtype, self.bias, hidden, hidden)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """As of ``Product``; with rotary and cache write in one kernel where it ``places``."""
        if not self.places:
            return super().heads(x, attention, batch, cache, rope)
        rows, place = _int8(x), attention.placement(batch, cache, rope)
        query = small_int8_qkv(rows, self.weight(len(rows.values)), self.bias, place)
        batch.see("query", query)
        return query

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        if not self.splits:
            return form.norm(norm, self.added(x, hidden))
        parts = int8_linear_parts(_int8(x), self.weight(len(hidden)))
        return form.sum_norm(norm, parts, hidden, self.bias)


class BlockProduct(Int8Product):
    """Both sides in few bits, the input by blocks of columns (RPTQ); arguments are as of ``Int8Product``."""

    def __init__(self, linear: Linear, dtype: torch.dtype, *, overlap: bool, splits: bool) -> None:
        super().__init__(linear, dtype, overlap=overlap, splits=splits)
        self._own = linear.in_blocks()
        self.form = BlockForm(self._own.steps)

    @property
    def bias(self) -> torch.Tensor:
        """With what the input's zeros take from each sum."""
        return self._own.shift

    def weight(self, rows: int) -> AnyInt8:
        """For any number of rows."""
        return self._own.weight


def _dense(x: Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def _wide(x: Rows) -> torch.Tensor | OperandRows:
    assert not isinstance(x, Int8Rows)
    return x


def _int8(x: Rows) -> Int8Rows:
    assert isinstance(x, Int8Rows)
    return x
