"""A linear layer's product, by the kernel that its scheme and the number of rows call for.

A product has a form, in which it takes its rows, and several ways to pass on its result: as it is, to queries
and cache, to an activation, or to the hidden states, also with the next norm. product_choice.py chooses a
step's products.

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
from ingot.kernels.product.few_rows.stream_product import (
    stream_gate_up,
    stream_linear,
    stream_qkv,
    takes_heads,
)
from ingot.kernels.product.int8.fp8_library import library_takes
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts
from ingot.kernels.product.packed.packed_prompt import (
    add_packed_prompt,
    packed_prompt,
    packed_prompt_gate_up,
    takes_many_rows,
    takes_wide,
)
from ingot.kernels.product.prompt_gate_up import prompt_gate_up, prompt_up, takes_gate_up, takes_up
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.tiles.packed_tiles import packed_splits
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.int4_weight import AnyInt8
from ingot.layers.attention import Attention
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.products.row_forms import (
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
        next_norm: the first norm of the next layer, or the final norm.
        after: the product after that: the next layer's QKV, or the head.
        encoded: cross-attention's query and output, if the layer has it.
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
        form: how it takes its input; not ``fused``: as modules compute it.
        overlap: whether the next kernel starts while this one ends.
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

    def in_form(self, x: torch.Tensor) -> Rows:
        """x [T, in_features] in the product's form, by a separate kernel."""
        return x

    def full_output(self, x: Rows) -> torch.Tensor:
        """x · Wᵀ + b: [T, out_features]."""
        y: torch.Tensor = self.linear(_dense(x))
        return y

    def added(self, x: Rows, hidden: torch.Tensor) -> torch.Tensor:
        """hidden + x · Wᵀ + b; ``hidden`` [T, out_features] may be overwritten."""
        return hidden + self.full_output(x)

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
        return attention.place(self.full_output(x), batch, cache, rope, tiles)

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        """The activation of a gate and up product, in the ``form`` of the down product."""
        return form.activation(mlp, self.full_output(x))

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(s) in a ``form``, s), s = hidden + x · Wᵀ + b, or hidden + post(x · Wᵀ + b); ``hidden``
        [T, hidden_size] may be overwritten.
        """
        if post is not None:
            return form.post_norm(norm, self.full_output(x), hidden, post)
        return form.norm(norm, self.full_output(x), hidden)


class SkippingProduct(Product):
    """A product without post-norm that adds nothing to the rows ``skipped`` [T] bool, not even its bias."""

    def __init__(self, product: Product, skipped: torch.Tensor) -> None:
        super().__init__(product.linear, overlap=product.overlap)
        self.form = product.form
        self.product = product
        self.skipped = skipped

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        assert post is None
        return form.norm(norm, self.product.full_output(x).masked_fill(self.skipped[:, None], 0), hidden)


class AddedProduct(Product):
    """A dense product without bias that the matrix library adds to the hidden states in place."""

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        weight = self.linear.weight
        assert isinstance(weight, torch.Tensor)
        return form.norm(norm, hidden.addmm_(_dense(x), weight.t()))


class GatedProduct(Product):
    """A dense gate and up product without bias, with its activation in one kernel where that is faster."""

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        rows, weight = _dense(x), self.linear.weight
        assert isinstance(weight, torch.Tensor)
        silu = isinstance(mlp, GatedMLP) and mlp.activation == "silu"
        if silu and isinstance(form, DenseForm) and takes_gate_up(rows, weight):
            return prompt_gate_up(rows, weight)
        return super().inner(x, mlp, form)


class BentProduct(Product):
    """A plain MLP's dense up product with bias, with GELU in one kernel where that is faster."""

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        rows, weight, bias = _dense(x), self.linear.weight, self.bias
        assert isinstance(weight, torch.Tensor)
        assert bias is not None
        if mlp.activation == "gelu" and isinstance(form, DenseForm) and takes_up(rows, weight):
            return prompt_up(rows, weight, bias)
        return super().inner(x, mlp, form)


class OddProduct(Product):
    """A dense product whose outputs are no multiple of 8 (a head's, of any number of logits): the matrix
    library writes such rows value by value, so that up to 64 are by the small kernels.
    """

    def full_output(self, x: Rows) -> torch.Tensor:
        rows = _dense(x)
        if not 0 < len(rows) <= MAX_ROWS:
            return super().full_output(x)
        tiles = self.linear.small_tiles.at(len(rows))
        return small_linear(rows, self.linear.stored(), self.bias, tiles=tiles)


class SmallProduct(Product):
    """Up to 64 rows by kernels that read the weight as it is stored, dense or in fewer bits.

    Args:
        norm: applied by the product, which then has the raw form.
        places: whether its kernel also places queries, keys and values.
        gates: whether its kernel also computes the gate's activation.
        sums: whether the next norm adds up its partial sums; otherwise the product adds the hidden states.
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

    def full_output(self, x: Rows) -> torch.Tensor:
        return self._product(_dense(x), None, *self._norm)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self.places:
            return super().heads(x, attention, batch, cache, rope)
        rows, place = _dense(x), attention.placement(batch, cache, rope)
        tiles = attention.small_tiles.at(len(rows))
        query = small_qkv(rows, self.linear.stored(), self.bias, *self._norm, place, tiles)
        batch.see("query", query)
        return query

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        """As of ``Product``, in one kernel if it ``gates`` or the MLP is plain, and down's form is dense."""
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


class StreamProduct(Product):
    """One row by a weight in 4 or 8 bits whose words stream through shared memory.

    Args:
        norm: applied by the product, which then has the raw form.
        gates: whether its kernel also computes the gate's activation.
    """

    def __init__(self, linear: Linear, *, norm: Norm | None = None, gates: bool = False) -> None:
        super().__init__(linear, overlap=True)
        self.norm, self.gates = norm, gates
        if norm is not None:
            self.form = RawForm(overlap=True)

    @property
    def _norm(self) -> tuple[torch.Tensor | None, float]:
        return (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    def full_output(self, x: Rows) -> torch.Tensor:
        return stream_linear(_dense(x), self.linear.stored(), self.bias, None, *self._norm)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """As of ``Product``, in one kernel if it ``takes_heads`` without norms of their own."""
        place = attention.placement(batch, cache, rope)
        if attention.q_norm is not None or not takes_heads(place):
            return super().heads(x, attention, batch, cache, rope)
        query = stream_qkv(_dense(x), self.linear.stored(), self.bias, *self._norm, place)
        batch.see("query", query)
        return query

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        if not self.gates or not isinstance(form, DenseForm):
            return super().inner(x, mlp, form)
        return stream_gate_up(_dense(x), self.linear.stored(), *self._norm)

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        return form.norm(norm, stream_linear(_dense(x), self.linear.stored(), self.bias, hidden))


class PackedProduct(Product):
    """Up to 256 rows by a weight of fewer bits, unpacked on the way to the tensor cores.

    Args:
        ordered: whether it takes its rows in the operand's order.
        wide: whether it is by the kernel of more rows (``takes_wide``).
    """

    def __init__(self, linear: Linear, *, overlap: bool, ordered: bool, wide: bool = False) -> None:
        super().__init__(linear, overlap=overlap)
        self.wide = wide
        if ordered:
            self.form = OperandForm()

    def full_output(self, x: Rows) -> torch.Tensor:
        if self.wide:
            return packed_prompt(_dense(x), self.linear.stored(), self.bias)
        return packed_matmul(_wide(x), self.linear.stored(), self.bias)

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        """As of ``Product``, in one kernel if it is ``wide`` and down's form is dense."""
        if self.wide and _gates(mlp, self.bias) and isinstance(form, DenseForm):
            return packed_prompt_gate_up(_dense(x), self.linear.stored())
        return super().inner(x, mlp, form)

    def heads(
        self,
        x: Rows,
        attention: Attention,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> torch.Tensor:
        """As of ``Product``, from partial sums if that is faster."""
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


class PromptProduct(Product):
    """A product by a weight of fewer bits that, of many rows, also computes the activation of gate and up, or
    adds to the hidden states in place.
    """

    def inner(self, x: Rows, mlp: GatedMLP | MLP, form: Form) -> Rows:
        rows, weight = _dense(x), self.linear.stored()
        many = takes_many_rows(rows, weight) or takes_wide(len(rows), rows.dtype, weight, natural=True)
        if _gates(mlp, self.bias) and isinstance(form, DenseForm) and many:
            return packed_prompt_gate_up(rows, weight)
        return super().inner(x, mlp, form)

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``, rounded once without ``post``."""
        rows, weight = _dense(x), self.linear.stored()
        if post is not None or not takes_many_rows(rows, weight):
            return super().join(x, hidden, norm, form, post)
        return form.norm(norm, add_packed_prompt(rows, weight, self.bias, hidden))


class Int8Product(Product):
    """Both sides in 8 bits, int8 or e4m3.

    Args:
        dtype: of its result.
        splits: whether the next norm adds up its partial sums; otherwise the product adds to the hidden
            states in place.
        places: whether its kernel also places queries, keys and values.
    """

    def __init__(
        self, linear: Linear, dtype: torch.dtype, *, overlap: bool, splits: bool, places: bool = False
    ) -> None:
        super().__init__(linear, overlap=overlap)
        self.dtype, self.splits, self.places = dtype, splits, places
        static, scheme = linear._parameters.get("input_scale"), linear.scheme
        by_head = scheme.input_group > 0 and not scheme.grouped_input
        group = scheme.input_group if scheme.grouped_input else 0
        self.form = Int8Form(static, scheme.input_dtype, by_head=by_head, group=group)

    def weight(self, rows: int) -> AnyInt8:
        """The weight for so many rows."""
        return self.linear.int8_weight(rows)

    def full_output(self, x: Rows) -> torch.Tensor:
        rows = _int8(x)
        return int8_linear(rows, self.weight(len(rows.values)), self.dtype, self.bias)

    def in_form(self, x: torch.Tensor) -> Int8Rows:
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
        if not self.places:
            return super().heads(x, attention, batch, cache, rope)
        rows, place = _int8(x), attention.placement(batch, cache, rope)
        query = small_int8_qkv(rows, self.weight(len(rows.values)), self.bias, place)
        batch.see("query", query)
        return query

    def join(
        self, x: Rows, hidden: torch.Tensor, norm: Norm, form: Form, post: Norm | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """As of ``Product``; without ``post`` rounded once, except by the matrix library."""
        if post is not None:
            return super().join(x, hidden, norm, form, post)
        rows, weight = _int8(x), self.weight(len(hidden))
        if not self.splits:
            if isinstance(weight, Int8Weight) and library_takes(rows, weight, self.dtype, self.bias):
                return form.norm(norm, self.full_output(x), hidden)
            return form.norm(norm, self.added(x, hidden))
        parts = int8_linear_parts(rows, weight)
        return form.sum_norm(norm, parts, hidden, self.bias)


class BlockProduct(Int8Product):
    """Both sides in few bits, the input by blocks of columns (RPTQ); arguments are as of ``Int8Product``."""

    def __init__(self, linear: Linear, dtype: torch.dtype, *, overlap: bool, splits: bool) -> None:
        super().__init__(linear, dtype, overlap=overlap, splits=splits)
        self._own = linear.in_blocks()
        self.form = BlockForm(self._own.steps)

    @property
    def bias(self) -> torch.Tensor:
        """The bias with what the input's zeros subtract from each sum."""
        return self._own.shift

    def weight(self, rows: int) -> AnyInt8:
        return self._own.weight


def _gates(mlp: GatedMLP | MLP, bias: torch.Tensor | None) -> bool:
    """Whether the kernel of a product without bias computes the activation, too."""
    return isinstance(mlp, GatedMLP) and mlp.activation == "silu" and bias is None


def _dense(x: Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def _wide(x: Rows) -> torch.Tensor | OperandRows:
    assert not isinstance(x, Int8Rows)
    return x


def _int8(x: Rows) -> Int8Rows:
    assert isinstance(x, Int8Rows)
    return x
