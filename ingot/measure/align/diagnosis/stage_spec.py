"""The checking decoder's stages with their weights, and a field for everything that ports get wrong.

run(replace(attention, causal=False), hidden)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ingot.reference.plain_layer import Hooks, NormSpec, PlainAttention, PlainLayer, PlainMlp, capped, rotated

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Products:
    """``F.linear`` that keeps the last product of each of its weights."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in], weight [out, in], bias [out] → [T, out]."""
        if id(weight) not in self._weights or x.requires_grad:
            return F.linear(x, weight, bias)
        kept = self._kept.get(id(weight))
        if kept is None or not (kept[0] is x or torch.equal(kept[0], x)):
            kept = self._kept[id(weight)] = (x, F.linear(x, weight))
        return kept[1] if bias is None else kept[1] + bias


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of queries and keys by position · frequency.

    ``frequencies`` is [r / 2]; positions are [S]. ``turns`` is how often the rotation is applied, -1
    backwards. ``interleaved`` pairs neighbouring channels, not channel i with i + r/2.
    """

    frequencies: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    factor: float = 1.0
    query_turns: int = 1
    key_turns: int = 1
    interleaved: bool = False

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, heads, head_dim] each → the same shapes."""
        query = self._turn(query, self.query_positions, self.query_turns)
        return query, self._turn(key, self.key_positions, self.key_turns)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, turns: int) -> torch.Tensor:
        if not turns:
            return x
        angles = torch.outer(positions.to(self.frequencies), self.frequencies) * turns  # [S, r / 2]
        size = self.factor ** abs(turns)
        cos, sin = ((part * size)[:, None].to(x) for part in (angles.cos(), angles.sin()))
        return rotated(x, cos, sin, interleaved=self.interleaved)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(PlainAttention):
    """Attention of whole sequences.

    ``qkv`` is [q_size + 2 kv_size, hidden]. ``rows`` reorders its rows and those of its bias, ``columns`` the
    columns of the output's weight.
    """

    rope: RopeSpec | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (query, key) if self.rope is None else self.rope.rotate(query, key)

    def product(self, leaf: str, x: torch.Tensor, product: Product) -> torch.Tensor:
        if leaf == "qkv_proj":
            joined = product(x, self.qkv, self.qkv_bias)
            return joined if self.rows is None else joined[:, self.rows]
        if self.columns is not None:  # weight[:, columns] · x
            x = torch.empty_like(x).index_copy(1, self.columns, x)
        return product(x, self.output, self.output_bias)


@dataclass(frozen=True, kw_only=True)
class MlpSpec(PlainMlp):
    """The feed-forward, with a gate or without."""

    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def product(self, leaf: str, x: torch.Tensor, product: Product) -> torch.Tensor:
        if leaf == "down_proj":
            return product(x, self.down, self.down_bias)
        up = product(x, self.up, self.up_bias)
        return up if self.gate is None else torch.cat([product(x, self.gate, self.gate_bias), up], dim=-1)


@dataclass(frozen=True, kw_only=True)
class LayerSpec(PlainLayer):
    attention: AttentionSpec
    mlp: MlpSpec


class _OwnWeights(Hooks):
    def __init__(self, product: Product, *parts: AttentionSpec | MlpSpec) -> None:
        self._product = product
        self._parts: Mapping[str, AttentionSpec | MlpSpec] = {part.name: part for part in parts}

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        part, _, leaf = name.rpartition(".")
        return self._parts[part].product(leaf, x, self._product)


@dataclass(frozen=True)
class SumSpec:
    """A branch x, normed by ``norm``, added to hidden states: stream · residual + x · branch."""

    name: str
    of: Literal["attention", "mlp"]
    stream: torch.Tensor
    residual: float = 1.0
    branch: float = 1.0
    norm: NormSpec | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The branch's output [T, hidden] → the sum."""
        x = x if self.norm is None else self.norm.run(x)
        return self.stream * self.residual + x * self.branch


@dataclass(frozen=True)
class HeadSpec:
    """Logits: (x · weightᵀ + bias) · scale, with a softcap if ``cap`` > 0."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0
    cap: float = 0.0

    def run(self, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
        """[T, hidden] → [T, vocabulary]."""
        return capped(product(x, self.weight, self.bias) * self.scale, self.cap)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embeddings, scaled, plus learned position embeddings if there are any."""

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


def matrices(spec: Any) -> Iterator[torch.Tensor]:
    """Every weight [out, in] of a spec and of the specs in it."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2:
            yield value
        elif is_dataclass(value):
            yield from matrices(value)


def run(spec: Spec, x: torch.Tensor, product: Product = plain) -> torch.Tensor:
    match spec:
        case LayerSpec():
            return spec.run(x, _OwnWeights(product, spec.attention, spec.mlp))
        case AttentionSpec() | MlpSpec():
            return spec.run(x, _OwnWeights(product, spec))
        case HeadSpec():
            return spec.run(x, product)
    return spec.run(x)
