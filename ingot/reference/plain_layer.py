"""A decoder layer's mathematics in plain PyTorch, without kernels or cache; it shares nothing with the
modules.

A field stands for everything that sets decoders (and faulty ports) apart. A caller's ``Hooks`` supply
products, rounding, keys and values, and recorded values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ingot.config.decoder_config import DecoderConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "none"]
Branch = Literal["gate", "up", "both", "product"]
Placement = Literal["pre", "post", "parallel", "normed_residual"]
Round = Callable[[torch.Tensor], torch.Tensor]
ReadVector = Callable[[str], torch.Tensor]
Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [T, 1, r / 2] of tokens' positions


class Hooks:
    """A caller's operations in a layer; here exact arithmetic, full sequences, nothing recorded."""

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] times the weight of the linear layer ``name``, plus its bias."""
        raise NotImplementedError

    def norm(self, norm: NormSpec, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] normed."""
        return norm.run(x, self.round)

    def bend(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return bend(x, activation)

    def attend(
        self, attention: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The new tokens' queries, keys and values [T, heads, head_dim] → as queries.

        Here of full sequences: a position that does not follow the last begins a new one.
        """
        at = attention.positions
        starts = (at[1:] != at[:-1] + 1).nonzero().flatten().cpu() + 1
        sequences = zip(*(part.tensor_split(starts) for part in (query, key, value, at)), strict=True)
        return torch.cat([attention.attend(q, k, v, own - own[0]) for q, k, v, own in sequences])

    def attend_encoded(self, attention: PlainCross, query: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads, head_dim] over the encoded positions of their own requests → the same shape."""
        raise NotImplementedError

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """A result as the next operation gets it."""
        return x

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The value to go on with at a place of step_record.py; ``change``: what the last product added."""
        return computed

    def made(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """A module's recorded output, which is seen."""
        output = self.recorded(name, output)
        self.see(name, output)
        return output

    def see(self, name: str, output: torch.Tensor) -> None:
        """Called with a module's output."""

    def branch(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """The output to go on with after attention, cross-attention or an MLP."""
        return output


@dataclass(frozen=True)
class NormSpec:
    """x / rms(x) · weight, or (x - mean) / std · weight + bias; ``kind`` none leaves x as it is.

    ``offset`` is added to the weight (Gemma's norms store the weight less one). A ``wide`` norm is rounded
    once, after its weight.
    """

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    kind: Literal["rms_norm", "layer_norm", "none"]
    offset: float = 0.0
    wide: bool = False

    def run(self, x: torch.Tensor, round_: Round = lambda y: y) -> torch.Tensor:
        if self.kind == "none":
            return x
        weight = self.weight + self.offset
        if self.kind == "layer_norm":
            return round_(F.layer_norm(x, weight.shape, weight, self.bias, self.eps))
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = (normed if self.wide else round_(normed)) * weight
        return round_(normed if self.bias is None else normed + self.bias)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """x [T, heads, head_dim] rotated by cos and sin [T, 1, r / 2]; channels from r on stay.

    Channel i rotates with i + r/2; ``interleaved``: 2 i with 2 i + 1.
    """
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        return torch.cat([torch.stack(pair, dim=-1).flatten(-2), rest], dim=-1)
    return torch.cat([*pair, rest], dim=-1)


@dataclass(frozen=True, kw_only=True)
class PlainAttention:
    """Self-attention of new tokens at ``positions`` [T].

    Its QKV product gives query heads, key heads, value heads. Query head h reads the key head
    h // (heads / kv_heads), or h mod kv_heads with ``cyclic_groups``. A query sees keys up to ``ahead``
    positions after its own; ``window`` > 0 limits how far back; ``softcap`` > 0 bends the scores.
    """

    name: str
    query_norm: NormSpec | None
    key_norm: NormSpec | None
    heads: int
    kv_heads: int
    head_dim: int
    positions: torch.Tensor
    scale: float
    logn_length: int = 0
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    ahead: int = 0
    cyclic_groups: bool = False
    turns: Turns | None = None

    @property
    def sizes(self) -> list[int]:
        """Columns of queries, keys and values in the QKV product."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]

    def run(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        joined = hooks.product(f"{self.name}.qkv_proj", hooks.recorded("attn_in", x))
        parts = joined.split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        query = query if self.query_norm is None else hooks.norm(self.query_norm, query)
        key = key if self.key_norm is None else hooks.norm(self.key_norm, key)
        query, key = self.rotate(query, key)
        if self.logn_length > 1:
            wide = self.positions.to(torch.promote_types(query.dtype, torch.float32))
            factor = (torch.log(wide + 1) / math.log(self.logn_length)).clamp(min=1)
            query = query * factor.to(query.dtype)[:, None, None]
        query, key = hooks.recorded("query", hooks.round(query)), hooks.round(key)
        attended = hooks.round(hooks.attend(self, query, key, value).flatten(1))
        output = hooks.product(f"{self.name}.o_proj", hooks.recorded("attended", attended))
        hooks.see(self.name, output)
        return hooks.branch(self.name, output)

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, head_dim] at their positions."""
        if self.turns is None:
            return query, key
        return rotated(query, *self.turns), rotated(key, *self.turns)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One sequence: queries [t, heads, head_dim] at positions [t] over all its keys and values [S,
        kv_heads, head_dim], from position 0 on; as queries.
        """
        group = self.heads // self.kv_heads
        key, value = (
            part.repeat(1, group, 1) if self.cyclic_groups else part.repeat_interleave(group, dim=1)
            for part in (key, value)
        )
        scores = capped(torch.einsum("qhd,khd->hqk", query, key) * self.scale, self.softcap)
        distance = positions[:, None] - torch.arange(key.shape[0], device=key.device)
        unseen = distance < -self.ahead if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window:
            unseen |= distance >= self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), value)


@dataclass(frozen=True, kw_only=True)
class PlainCross:
    """Cross-attention: every query sees all encoded positions."""

    name: str
    head_dim: int
    scale: float

    def run(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        query = hooks.product(f"{self.name}.q_proj", hooks.recorded("cross_in", x))
        query = hooks.recorded("cross_query", query.unflatten(-1, (-1, self.head_dim)))
        attended = hooks.round(hooks.attend_encoded(self, query).flatten(1))
        output = hooks.product(f"{self.name}.o_proj", hooks.recorded("cross_attended", attended))
        hooks.see(self.name, output)
        return hooks.branch(self.name, output)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[t, heads, head_dim] over one input's keys and values [P, heads, head_dim]."""
        weights = (torch.einsum("qhd,khd->hqk", query, key) * self.scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


@dataclass(frozen=True, kw_only=True)
class PlainMlp:
    """down(act(gate(x)) · up(x)); ``on`` names the activated branch, None: down(act(up(x)))."""

    name: str
    activation: Activation
    on: Branch | None

    def run(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        return self.of(hooks.recorded("mlp_in", x), hooks)

    def of(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        """The same, of states that ``recorded`` has returned."""
        if self.on is None:
            inner = self._bent(hooks.product(f"{self.name}.up_proj", x), hooks)
        else:
            gate, up = hooks.product(f"{self.name}.gate_up_proj", x).chunk(2, dim=-1)
            gate = self._bent(gate, hooks) if self.on in ("gate", "both") else gate
            up = self._bent(up, hooks) if self.on in ("up", "both") else up
            inner = hooks.round(gate * up)
            inner = self._bent(inner, hooks) if self.on == "product" else inner
        output = hooks.product(f"{self.name}.down_proj", hooks.recorded("inner", inner))
        hooks.see(self.name, output)
        return hooks.branch(self.name, output)

    def _bent(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        return hooks.round(hooks.bend(x, self.activation))


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap); x itself where there is no cap."""
    return torch.tanh(x / cap) * cap if cap else x


def bend(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "silu":
            return x * torch.sigmoid(x)
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    return x


@dataclass(frozen=True, kw_only=True)
class PlainLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), each sum with factors.

    ``attention_norm`` and ``mlp_norm`` norm what a branch adds. Between the branches may be cross-attention
    with a norm before it. ``placement``: norms before their branch (pre), after the sum (post), both branches
    from the layer's input (parallel), or sums with the normed states (normed_residual).
    """

    name: str
    input_norm: NormSpec
    attention: PlainAttention
    post_norm: NormSpec
    mlp: PlainMlp
    attention_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    cross_norm: NormSpec | None = None
    cross: PlainCross | None = None
    placement: Placement = "pre"
    attention_residual: float = 1.0
    attention_branch: float = 1.0
    mlp_residual: float = 1.0
    mlp_branch: float = 1.0

    def run(self, x: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        post = self.placement == "post"
        normed = x if post else hooks.norm(self.input_norm, x)
        stream = normed if self.placement == "normed_residual" else x
        branch = _normed(self.attention_norm, self.attention.run(normed, hooks), hooks)
        branch = _scaled(branch, self.attention_branch)
        middle = self._joined(_scaled(stream, self.attention_residual), branch, hooks)
        middle = hooks.norm(self.input_norm, middle) if post else middle
        if self.cross is not None and self.cross_norm is not None:
            branch = self.cross.run(hooks.norm(self.cross_norm, middle), hooks)
            middle = self._joined(middle, branch, hooks)
        normed = middle if post else hooks.norm(self.post_norm, x if self.placement == "parallel" else middle)
        stream = normed if self.placement == "normed_residual" else middle
        branch = _normed(self.mlp_norm, self.mlp.run(normed, hooks), hooks)
        branch = _scaled(branch, self.mlp_branch)
        out = self._joined(_scaled(stream, self.mlp_residual), branch, hooks)
        out = hooks.norm(self.post_norm, out) if post else out
        hooks.see(self.name, out)
        return out

    def _joined(self, stream: torch.Tensor, branch: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        return hooks.recorded("stream", hooks.round(stream + branch), branch)


def _normed(norm: NormSpec | None, branch: torch.Tensor, hooks: Hooks) -> torch.Tensor:
    return branch if norm is None else hooks.norm(norm, branch)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """No operation for 1, since operations are timed."""
    return x if factor == 1 else x * factor


def norm_spec(config: DecoderConfig, name: str, read: ReadVector) -> NormSpec:
    """A norm over the hidden states; ``read`` gives its vectors by name."""
    bias = read(f"{name}.bias") if config.norm == "layer_norm" else None
    weight = read(f"{name}.weight")
    return NormSpec(name, weight, bias, config.norm_eps, config.norm, wide=config.wide_norms)


def post_norm_spec(config: DecoderConfig, name: str, read: ReadVector) -> NormSpec | None:
    """The norm of what a branch adds, ``self_attn_norm`` or ``mlp_norm``, where the config has post-norms."""
    return norm_spec(config, name, read) if config.post_norms else None


def turns_of(rows: torch.Tensor) -> Turns:
    """Cosines and sines from rows [T, r] of a rotary table."""
    cos, sin = rows[:, None].chunk(2, dim=-1)
    return cos, sin


def plain_attention(
    config: DecoderConfig,
    layer: int,
    name: str,
    read: ReadVector,
    positions: torch.Tensor,
    turns: Turns | None,
) -> PlainAttention:
    query_norm, key_norm = (
        NormSpec(path, read(f"{path}.weight"), None, config.norm_eps, "rms_norm", wide=config.wide_norms)
        if config.qk_norm
        else None
        for path in (f"{name}.q_norm", f"{name}.k_norm")
    )
    return PlainAttention(
        name=name,
        query_norm=query_norm,
        key_norm=key_norm,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        positions=positions,
        scale=config.attention_scale,
        logn_length=config.logn_length,
        window=config.window(layer),
        softcap=config.attention_softcap,
        turns=turns,
    )


def plain_mlp(config: DecoderConfig, name: str) -> PlainMlp:
    return PlainMlp(name=name, activation=config.activation, on="gate" if config.gated else None)


def plain_layer(
    config: DecoderConfig,
    layer: int,
    read: ReadVector,
    positions: torch.Tensor,
    turns: Turns | None,
    name: str | None = None,
) -> PlainLayer:
    """A layer for tokens at ``positions`` [T]; ``name`` None: it is ``layers.{layer}``."""
    name = f"layers.{layer}" if name is None else name
    attends = config.crosses
    size, scale, to = config.head_dim, config.attention_scale, f"{name}.encoder_attn"
    return PlainLayer(
        name=name,
        input_norm=norm_spec(config, f"{name}.input_layernorm", read),
        attention=plain_attention(config, layer, f"{name}.self_attn", read, positions, turns),
        post_norm=norm_spec(config, f"{name}.post_attention_layernorm", read),
        mlp=plain_mlp(config, f"{name}.mlp"),
        attention_norm=post_norm_spec(config, f"{name}.self_attn_norm", read),
        mlp_norm=post_norm_spec(config, f"{name}.mlp_norm", read),
        cross_norm=norm_spec(config, f"{to}_layernorm", read) if attends else None,
        cross=PlainCross(name=to, head_dim=size, scale=scale) if attends else None,
    )
