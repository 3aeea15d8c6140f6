"""A decoder's stages in plain PyTorch, with a knob for everything that ports get wrong.

Owns the formulas: each spec holds the weights and the settings of one stage and computes it for one sequence
(or several, laid end to end) without cache, kernels or modules. Knows no engine: ``read.py`` fills specs
from one, and ``variants_*.py`` turn the knobs.

    replace(attention, causal=False).run(hidden)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ingot.align.culprits.products import Product, plain

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "none"]
Placement = Literal["pre", "post", "parallel", "normed_residual"]


@dataclass(frozen=True)
class NormSpec:
    """x / rms(x) · weight, or (x - mean) / std · weight + bias; ``kind`` none leaves x as it is.

    ``offset`` is added to the weight (Gemma's norms store the weight less one).
    """

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    kind: Literal["rms_norm", "layer_norm", "none"]
    offset: float = 0.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] → [T, size]."""
        if self.kind == "none":
            return x
        centred = x - x.mean(dim=-1, keepdim=True) if self.kind == "layer_norm" else x
        scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        y = centred * scale * (self.weight + self.offset)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of queries and keys by position · frequency.

    ``frequencies`` is [r / 2]; positions are [S]. ``turns`` says how often the rotation is applied: 0 never,
    2 twice, -1 backwards. ``interleaved`` pairs neighbouring channels, not channel i with i + r/2.
    """

    frequencies: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    factor: float = 1.0
    query_turns: int = 1
    key_turns: int = 1
    interleaved: bool = False

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[S, heads, head_dim] → the same shape."""
        return self._turn(x, self.query_positions, self.query_turns)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[S, heads, head_dim] → the same shape."""
        return self._turn(x, self.key_positions, self.key_turns)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, turns: int) -> torch.Tensor:
        if not turns:
            return x
        angles = torch.outer(positions.to(self.frequencies), self.frequencies) * turns  # [S, r / 2]
        size = self.factor ** abs(turns)
        cos, sin = (angles.cos() * size)[:, None].to(x), (angles.sin() * size)[:, None].to(x)
        width = 2 * self.frequencies.shape[0]
        turned, rest = x[..., :width], x[..., width:]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, dim=-1)
        return torch.cat([joined, rest], dim=-1)


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention of whole sequences.

    ``qkv`` is [q_size + 2 kv_size, hidden]: query heads, key heads, value heads. Query head h reads the key
    head h // (heads / kv_heads), or h mod kv_heads with ``cyclic_groups``. A query sees keys up to ``ahead``
    positions after its own; ``window`` > 0 limits how far back. ``rows`` puts the rows of ``qkv`` and of
    its bias in another order, ``columns`` those of the output's weight.
    """

    name: str
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    query_norm: NormSpec | None
    key_norm: NormSpec | None
    heads: int
    kv_heads: int
    head_dim: int
    positions: torch.Tensor
    rope: RopeSpec | None
    scale: float
    logn_length: int = 0
    window: int = 0
    causal: bool = True
    ahead: int = 0
    cyclic_groups: bool = False
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """Rows of queries, keys and values in ``qkv``."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]

    def run(self, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
        """[S, hidden] → [S, hidden]."""
        joined = product(x, self.qkv, self.qkv_bias)
        joined = joined if self.rows is None else joined[:, self.rows]
        parts = joined.split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        query = query if self.query_norm is None else self.query_norm.run(query)
        key = key if self.key_norm is None else self.key_norm.run(key)
        if self.rope is not None:
            query, key = self.rope.queries(query), self.rope.keys(key)
        if self.logn_length > 1:
            query = query * self._logn(x)
        group = self.heads // self.kv_heads
        shape = (1, group, 1) if self.cyclic_groups else None
        key = key.repeat(shape) if shape else key.repeat_interleave(group, dim=1)
        value = value.repeat(shape) if shape else value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        scores = scores.masked_fill(~self.visible(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value).flatten(1)
        if self.columns is not None:  # weight[:, columns] · mixed
            mixed = torch.empty_like(mixed).index_copy(1, self.columns, mixed)
        return product(mixed, self.output, self.output_bias)

    def visible(self) -> torch.Tensor:
        """[S, S]: whether a query (row) sees a key; a position that does not follow the last begins a new
        sequence.
        """
        starts = torch.ones_like(self.positions, dtype=torch.bool)
        starts[1:] = self.positions[1:] != self.positions[:-1] + 1
        sequence = starts.cumsum(0)
        distance = self.positions[:, None] - self.positions[None, :]
        seen = sequence[:, None] == sequence[None, :]
        if self.causal:
            seen &= distance >= -self.ahead
        return seen & (distance < self.window) if self.window else seen

    def _logn(self, x: torch.Tensor) -> torch.Tensor:
        """max(1, log(position + 1) / log(logn_length)), [S, 1, 1]."""
        return ((self.positions + 1).to(x).log() / math.log(self.logn_length)).clamp(min=1.0)[:, None, None]


@dataclass(frozen=True)
class MlpSpec:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate; ``on`` names the bent branch."""

    name: str
    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation
    on: Literal["gate", "up", "both", "product"] = "gate"

    def run(self, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
        """[T, hidden] → [T, hidden]."""
        inner = product(x, self.up, self.up_bias)
        if self.gate is None:
            return product(bend(inner, self.activation), self.down, self.down_bias)
        gate = product(x, self.gate, self.gate_bias)
        if self.on in ("gate", "both"):
            gate = bend(gate, self.activation)
        if self.on in ("up", "both"):
            inner = bend(inner, self.activation)
        both = gate * inner
        both = bend(both, self.activation) if self.on == "product" else both
        return product(both, self.down, self.down_bias)


def bend(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation function of that name."""
    match activation:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    return x


@dataclass(frozen=True)
class LayerSpec:
    """x + attention(norm(x)), then x + mlp(norm(x)), each sum with factors.

    ``placement``: norms before their branch (pre), after the sum (post), both branches from the layer's input
    (parallel), or sums with the normed states (normed_residual).
    """

    input_norm: NormSpec
    attention: AttentionSpec
    post_norm: NormSpec
    mlp: MlpSpec
    placement: Placement = "pre"
    attention_residual: float = 1.0
    attention_branch: float = 1.0
    mlp_residual: float = 1.0
    mlp_branch: float = 1.0

    def run(self, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
        """[S, hidden] → [S, hidden]."""
        normed = x if self.placement == "post" else self.input_norm.run(x)
        stream = normed if self.placement == "normed_residual" else x
        branch = self.attention.run(normed, product) * self.attention_branch
        middle = stream * self.attention_residual + branch
        if self.placement == "post":
            middle = self.input_norm.run(middle)
        normed = middle if self.placement == "post" else self.post_norm.run(middle)
        if self.placement == "parallel":
            normed = self.post_norm.run(x)
        stream = normed if self.placement == "normed_residual" else middle
        out = stream * self.mlp_residual + self.mlp.run(normed, product) * self.mlp_branch
        return self.post_norm.run(out) if self.placement == "post" else out


@dataclass(frozen=True)
class SumSpec:
    """A branch joining the stream of hidden states: stream · residual + x · branch."""

    name: str
    of: Literal["attention", "mlp"]
    stream: torch.Tensor
    residual: float = 1.0
    branch: float = 1.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The branch's output [T, hidden] → the sum."""
        return self.stream * self.residual + x * self.branch


@dataclass(frozen=True)
class HeadSpec:
    """Logits: (x · weightᵀ + bias) · scale."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0

    def run(self, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
        """[T, hidden] → [T, vocabulary]."""
        return product(x, self.weight, self.bias) * self.scale


@dataclass(frozen=True)
class EmbeddingSpec:
    """Rows of the tokens, scaled, plus rows of their positions if the model has learned ones."""

    name: str
    tokens: torch.Tensor
    places: torch.Tensor | None
    positions: torch.Tensor
    scale: float = 1.0
    shift: int = 0

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, hidden]."""
        rows = self.tokens[ids] * self.scale
        if self.places is None:
            return rows
        return rows + self.places[(self.positions + self.shift).clamp(0, self.places.shape[0] - 1)]


Spec = NormSpec | AttentionSpec | MlpSpec | SumSpec | LayerSpec | HeadSpec | EmbeddingSpec
Multiplying = AttentionSpec | MlpSpec | LayerSpec | HeadSpec  # stages with products


def matrices(spec: Any) -> Iterator[torch.Tensor]:
    """Every weight [out, in] of a spec and of the specs in it."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2:
            yield value
        elif is_dataclass(value):
            yield from matrices(value)


def run(spec: Spec, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
    """A spec's output, with ``product`` for its products."""
    return spec.run(x, product) if isinstance(spec, Multiplying) else spec.run(x)
