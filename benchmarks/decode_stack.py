"""Random weights and caches of a 7B or 8B LLaMA's decode step, and the step as the kernels compute it.

``decode_variants.py`` times it.

    logits = Stack(layers=32, batch=8).hybrid_step(8, plan, frozenset(SHAPES))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from decode_candidates import Tiles

from ingot.kernels.activation.gated_mlp import silu_mul, silu_mul_operand
from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.cache.rope_kv_write import QkvParts, rope_kv_write
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.product.few_rows.small_qkv import small_qkv
from ingot.kernels.product.packed.packed_matmul import (
    FloatRows,
    packed_matmul,
    packed_matmul_parts,
    takes_operand,
)
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.rows.row_endings import AS_THEY_ARE, OperandOrder
from ingot.kernels.tiles.packed_tiles import packed_splits
from ingot.kernels.weight.stored_weight import AnyWeight, StoredWeight

LAYERS, LONGEST, EPS = 32, 4096, 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA and of its requests' contexts."""

    hidden: int = 4096
    inner: int = 11008
    heads: int = 32
    head_dim: int = 128
    vocabulary: int = 151936
    context: int = 640
    block: int = 64
    kv_heads: int = 0  # 0: as many as heads

    @property
    def cached_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    def products(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of every product's weight."""
        return {
            "qkv": ((self.heads + 2 * self.cached_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocabulary, self.hidden),
        }


LLAMA_7B = Shape()
NAMED = {
    "llama-7b": LLAMA_7B,
    "llama31-8b": Shape(inner=14336, vocabulary=128256, kv_heads=8),
    "qwen3-8b": Shape(inner=12288, kv_heads=8),  # without its norms of heads
}
SHAPES = LLAMA_7B.products()
Plan = dict[str, Tiles | None]


def apart(x: FloatRows, weight: AnyWeight, tiles: Tiles | None) -> torch.Tensor:
    """A product with nothing folded into it, by ``packed_matmul`` and the tiles where bits are few."""
    if isinstance(weight, StoredWeight):
        return packed_matmul(x, weight, tiles=tiles)
    assert isinstance(x, torch.Tensor)
    return F.linear(x, weight)


def ordered(op: str, rows: int, weight: AnyWeight, plan: Plan, small: frozenset[str]) -> bool:
    """Whether the op takes its input in the operand's order, with the plan's tiles."""
    if op in small or not isinstance(weight, StoredWeight):
        return False
    direct = (plan.get(op) or {}).get("DIRECT")
    split = op in ("o", "down")
    return takes_operand(rows, weight, weight.values.device, split) if direct is None else direct > 0


class Stack:
    """Random weights of ``layers`` layers and a head, and the caches of a batch."""

    def __init__(
        self, layers: int, batch: int, device: str = "cuda", shape: Shape = LLAMA_7B, heads: int = 2
    ) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.float16, "device": device}
        self.layers, self.batch, self.shape = layers, batch, shape
        self.weights: dict[str, list[AnyWeight]] = {
            op: [
                torch.empty(size, **options).normal_(std=1.28 / size[1] ** 0.5)
                for _ in range(heads if op == "head" else layers)
            ]
            for op, size in shape.products().items()
        }
        self.norm = torch.empty(shape.hidden, **options).uniform_(0.5, 1.5)
        blocks = shape.context // shape.block
        cache = (batch * blocks, shape.cached_heads, shape.block, shape.head_dim)
        self.caches = [[torch.empty(cache, **options).normal_() for _ in range(2)] for _ in range(layers)]
        self.tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
        self.arrivals = torch.zeros(batch * shape.heads, dtype=torch.int32, device=device)
        self.lengths = torch.full((batch,), shape.context, dtype=torch.int32, device=device)
        self.positions = torch.full((batch,), shape.context - 1, device=device)
        self.slots = self.tables[:, -1].long() * shape.block + shape.block - 1
        half = shape.head_dim // 2
        angles = torch.arange(LONGEST)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.rotary = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        self.x = torch.empty(batch, shape.hidden, **options).normal_()
        self.inner = torch.empty(batch, shape.inner, **options).normal_()
        self.q = torch.empty(batch, shape.heads, shape.head_dim, **options).normal_()
        self.parts = torch.empty(8, batch, shape.hidden, dtype=torch.float32, device=device).normal_()
        if device == "cuda":
            torch.cuda.synchronize()  # overlapping kernels read weights before they wait

    def place(self, rows: int, layer: int) -> Placement:
        """Where rows of the QKV product go."""
        tokens = TokenPlaces(self.positions[:rows], self.positions[:rows], self.slots[:rows])
        heads = QkvHeads(self.shape.heads, self.shape.cached_heads, self.shape.head_dim)
        return Placement(self.rotary, tokens, PagedCache(*self.caches[layer]), heads)

    def attend(
        self, q: torch.Tensor, layer: int, tiles: Tiles | None, order: OperandOrder | None = None
    ) -> torch.Tensor:
        """[rows, heads, head_dim] → the same, as ``order`` says."""
        rows = len(q)
        sequences = Sequences(self.tables[:rows], self.lengths[:rows], LONGEST)
        cache, scoring = PagedCache(*self.caches[layer]), Scoring(self.shape.head_dim**-0.5)
        output = AttentionOutput(scales=order)
        return paged_attention(q, cache, sequences, scoring, tiles, output, self.arrivals)

    def weight(self, op: str, layer: int) -> AnyWeight:
        """An op's weight in a layer."""
        return self.weights[op][layer % len(self.weights[op])]

    def fused(self, op: str, layer: int, rows: int, tiles: Tiles | None) -> Any:
        """One op of one layer: of one row with norm and residual, of more rows without."""
        x, one = self.x[:rows], rows == 1 and (tiles or {}).get("BLOCK_T", 1) == 1
        if op == "attention":
            return self.attend(self.q[:rows], layer, tiles)
        if op == "norm":
            return sum_norm(self.parts[:4, :rows], x, self.norm, EPS, tiles=tiles)
        norm, eps, weight = (
            (self.norm, EPS, self.weight(op, layer)) if one else (None, 0.0, self.weight(op, layer))
        )
        if op == "qkv":
            return small_qkv(x, weight, None, norm, eps, self.place(rows, layer), tiles)
        if op == "gate_up":
            return small_gate_up(x, weight, norm, eps, tiles)
        if op == "head":
            return small_linear(x, weight, norm_weight=norm, norm_eps=eps, tiles=tiles)
        source = self.inner[:rows] if op == "down" else x
        if one:
            return small_linear(source, weight, residual=x, tiles=tiles)
        return small_linear_parts(source, weight, tiles)

    def folded_step(self, rows: int, plan: Plan) -> torch.Tensor:
        """Norms folded into the products: six launches a layer and one for the head."""
        x, norm = self.x[:rows], (self.norm, EPS)
        for layer in range(self.layers):
            weights = {op: self.weight(op, layer) for op in SHAPES if op != "head"}
            q = small_qkv(x, weights["qkv"], None, *norm, self.place(rows, layer), plan.get("qkv"))
            attended = self.attend(q, layer, plan.get("attention")).flatten(1)
            x = small_linear(attended, weights["o"], residual=x, tiles=plan.get("o"))
            inner = small_gate_up(x, weights["gate_up"], *norm, plan.get("gate_up"))
            x = small_linear(inner, weights["down"], residual=x, tiles=plan.get("down"))
        return small_linear(x, self.weight("head", 0), None, None, *norm, plan.get("head"))

    def hybrid_step(self, rows: int, plan: Plan, small: frozenset[str], head: bool = True) -> torch.Tensor:
        """Of the products those in ``small`` by the small kernels, the others by the matrix library, or with
        weights of fewer bits by ``packed_matmul`` and its tiles in the plan; up to the final norm without
        ``head``.

        The plan also names tiles of ``rms``, ``rope`` and ``silu``, the kernels beside those products.
        """
        x, norm = self.x[:rows], (self.norm, EPS)
        x = x if "o" in small else x.clone()  # the library adds in place
        takes = {op: ordered(op, rows, self.weight(op, 0), plan, small) for op in SHAPES if op != "head"}
        hidden: FloatRows
        ending = OperandOrder() if takes["qkv"] else AS_THEY_ARE
        hidden, _ = rms_norm(x, *norm, tiles=plan.get("rms"), ending=ending)
        for layer in range(self.layers):
            weights = {op: self.weight(op, layer) for op in SHAPES if op != "head"}
            place = self.place(rows, layer)
            if "qkv" in small:
                q = small_qkv(hidden, weights["qkv"], None, None, 0.0, place, plan.get("qkv"))
            else:
                qkv = self._sums(hidden, weights["qkv"], plan.get("qkv"))
                q = rope_kv_write(qkv, place, tiles=plan.get("rope"))
            order = OperandOrder() if takes["o"] else None
            attended: FloatRows = self.attend(q, layer, plan.get("attention"), order).flatten(1)
            attended = OperandRows(attended) if takes["o"] else attended
            hidden, x = self._join(x, attended, weights["o"], "o", plan, small, takes["gate_up"])
            if "gate_up" in small:
                inner = small_gate_up(hidden, weights["gate_up"], tiles=plan.get("gate_up"))
            else:
                gate_up = apart(hidden, weights["gate_up"], plan.get("gate_up"))
                inner = (silu_mul_operand if takes["down"] else silu_mul)(gate_up, plan.get("silu"))
            after = takes["qkv"] and layer < self.layers - 1
            hidden, x = self._join(x, inner, weights["down"], "down", plan, small, after)
        if not head:
            return hidden
        wide = self.weight("head", 0)
        if "head" in small:
            return small_linear(hidden, wide, tiles=plan.get("head"))
        return apart(hidden, wide, plan.get("head"))

    def _sums(self, x: FloatRows, weight: AnyWeight, tiles: Tiles | None) -> torch.Tensor | QkvParts:
        """The QKV product, in parts where its tiles split."""
        if isinstance(weight, StoredWeight):
            splits = packed_splits(self.batch, weight, self.norm.device, isinstance(x, OperandRows))
            if (tiles or {}).get("SPLITS", splits) > 1:
                return QkvParts(packed_matmul_parts(x, weight, tiles), None, self.norm.dtype)
        return apart(x, weight, tiles)

    def _join(
        self,
        x: torch.Tensor,
        y: FloatRows,
        weight: AnyWeight,
        op: str,
        plan: Plan,
        small: frozenset[str],
        ordered: bool,
    ) -> tuple[FloatRows, torch.Tensor]:
        """The normalised stream and the stream after a product's result has joined it."""
        ending = OperandOrder() if ordered else AS_THEY_ARE
        if op in small:
            parts = small_linear_parts(y, weight, plan.get(op))
            return sum_norm(parts, x, self.norm, EPS, tiles=plan.get("norm"), ending=ending)
        if isinstance(weight, StoredWeight):
            parts = packed_matmul_parts(y, weight, plan.get(op))
            return sum_norm(parts, x, self.norm, EPS, tiles=plan.get("norm"), ending=ending)
        return rms_norm(x.addmm_(y, weight.t()), self.norm, EPS, tiles=plan.get("rms"))
