"""Bugs that ports really have, planted into a loaded engine.

Owns the bugs and the culprit that ``align`` has to name for each. Patches are bound methods, so that a copy
of a module is as wrong as the module. Knows nothing of how a bug is found.

    plant(llm, "rope_twice")    # a layer's bug goes into the last layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from ingot import LLM
from ingot.layers.attention import Attention
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.mlp import GatedMLP
from ingot.layers.products.layer_products import LayerProducts
from ingot.layers.products.row_forms import Rows
from ingot.layers.rotary import RotaryTable
from ingot.measure.align.stages.isolated_module import attention_part, mlp_part
from tests.measure.align.plain_attention import Plant, attending


@dataclass(frozen=True)
class Bug:
    """``kinds`` are the tiny models that can have it (tests/tiny_models.py), ``config`` what it needs there.

    ``decode``: it shows in cached steps only.
    """

    culprit: str
    put: Plant
    kinds: tuple[str, ...] = ("llama", "qwen2")
    config: tuple[tuple[str, Any], ...] = ()
    decode: bool = False


def plant(llm: LLM, name: str) -> None:
    """Put a bug into a loaded engine; one of a layer goes into its last layer."""
    if name == "stop_ids":
        llm.executor.stop_ids = frozenset()
        llm.executor.selector.stop_ids = frozenset()
        return
    model = llm.engine.model
    last = model.layers[-1]
    assert isinstance(last, DecoderLayer)
    with torch.no_grad():
        BUGS[name].put(model, last)


def _rotary(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    def put(model: Decoder, layer: DecoderLayer) -> None:
        assert model.rotary is not None
        cos, sin = model.rotary.table.chunk(2, dim=-1)
        model.rotary.table.copy_(torch.cat(change(cos, sin), dim=-1))

    return put


def _other_rope(**changes: Any) -> Plant:
    def put(model: Decoder, layer: DecoderLayer) -> None:
        assert model.rotary is not None
        other = RotaryTable(replace(model.rotary.config, **changes), model.rotary.max_positions)
        model.rotary.table.copy_(other.table)

    return put


def _rows(make: Callable[[Attention, torch.Tensor], torch.Tensor]) -> Plant:
    """Rows of the QKV product in another order."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        attention, linear = layer.self_attn, layer.self_attn.qkv_proj
        index = make(attention, torch.arange(linear.out_features))
        linear.weight.copy_(linear.weight[index].clone())
        if linear.has_bias:
            linear.bias.copy_(linear.bias[index].clone())

    return put


def _split(attention: Attention, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    config = attention.config
    query, key, value = rows.split([config.q_size, config.kv_size, config.kv_size])
    return query, key, value


def _paired(attention: Attention, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
    """q and k as LLaMA's first files have them, rows of a pair next to each other; or ``back`` once more."""
    query, key, value = _split(attention, rows)
    half = attention.config.head_dim // 2
    shape = (-1, half, 2) if back else (-1, 2, half)
    turned = [part.view(*shape).transpose(1, 2).flatten() for part in (query, key)]
    return torch.cat([*turned, value])


def _per_group(attention: Attention, rows: torch.Tensor) -> torch.Tensor:
    """q, k, v of one group after another, as in fused checkpoints."""
    config = attention.config
    query, key, value = (p.view(config.num_kv_heads, -1, config.head_dim) for p in _split(attention, rows))
    return torch.cat([query, key, value], dim=1).flatten()


def _reversed_heads(attention: Attention, rows: torch.Tensor) -> torch.Tensor:
    width = attention.config.head_dim
    return torch.cat([part.view(-1, width).flip(0).flatten() for part in _split(attention, rows)])


def _key_first(attention: Attention, rows: torch.Tensor) -> torch.Tensor:
    query, key, value = _split(attention, rows)
    return torch.cat([key, query, value])


def _cyclic_groups(model: Decoder, layer: DecoderLayer) -> None:
    """Query heads (and the output's columns) in the order in which head h belongs to key head h mod n."""
    attention = layer.self_attn
    config = attention.config
    heads = torch.arange(config.q_size).view(config.num_kv_heads, -1, config.head_dim)
    index = heads.transpose(0, 1).flatten()
    _rows(lambda _, rows: torch.cat([index, rows[config.q_size :]]))(model, layer)
    attention.o_proj.weight.copy_(attention.o_proj.weight[:, index].clone())


def _weight(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """A parameter of the layer changed."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        parameter = layer.get_parameter(path)
        parameter.copy_(change(parameter.clone()))

    return put


def _gate_up_swapped(model: Decoder, layer: DecoderLayer) -> None:
    for tensor in layer.mlp.gate_up_proj.parameters():
        tensor.copy_(tensor.roll(len(tensor) // 2, 0))


def _bent(make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Plant:
    """Another arithmetic between gate, up and the down product."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        def activate(mlp: GatedMLP, gate_up: torch.Tensor, tiles: object = None) -> torch.Tensor:
            return make(*gate_up.chunk(2, dim=-1))

        layer.mlp.activate = MethodType(activate, layer.mlp)

    return put


def _set(path: str, value: object) -> Plant:
    """A setting of one of the layer's modules."""
    module, _, name = path.rpartition(".")
    return lambda model, layer: setattr(layer.get_submodule(module), name, value)


def _norm(which: str, normed: Callable[[Any, torch.Tensor], torch.Tensor]) -> Plant:
    """Another arithmetic in a layer's norm."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        def forward(
            norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, tiles: object = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            total = x if residual is None else x + residual
            return normed(norm, total), total

        module = getattr(layer, which)
        module.forward = MethodType(forward, module)

    return put


def _other_kind(norm: Any, total: torch.Tensor) -> torch.Tensor:
    if hasattr(norm, "bias"):
        return F.rms_norm(total, total.shape[-1:], norm.weight, norm.eps)
    return F.layer_norm(total, total.shape[-1:], norm.weight, None, norm.eps)


def _layer(sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    """A layer with another order of sums: (layer, attention, stream) → (branch output, residual)."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        def forward(
            x: torch.Tensor,
            hidden: torch.Tensor,
            batch: ForwardBatch,
            cache: LayerCache,
            rope: torch.Tensor | None,
            products: LayerProducts,
        ) -> tuple[Rows, torch.Tensor]:
            attend = lambda x: attention_part(layer.self_attn, "attention", x, batch, cache, rope)  # noqa: E731
            return products.after.form.norm(products.next_norm, *sums(layer, attend, hidden))

        layer.forward = forward

    return put


def _no_attention_residual(layer, attend, x):  # type: ignore[no-untyped-def]
    hidden, middle = layer.post_attention_layernorm(attend(layer.input_layernorm(x)[0]))
    return mlp_part(layer.mlp, "mlp", hidden), middle


def _no_mlp_residual(layer, attend, x):  # type: ignore[no-untyped-def]
    hidden, middle = layer.post_attention_layernorm(attend(layer.input_layernorm(x)[0]), x)
    return mlp_part(layer.mlp, "mlp", hidden), torch.zeros_like(middle)


def _scaled_residual(layer, attend, x):  # type: ignore[no-untyped-def]
    hidden, middle = layer.post_attention_layernorm(0.5 * attend(layer.input_layernorm(x)[0]), x)
    return 0.5 * mlp_part(layer.mlp, "mlp", hidden), middle


def _post_norm(layer, attend, x):  # type: ignore[no-untyped-def]
    middle = layer.input_layernorm(attend(x), x)[0]
    out = layer.post_attention_layernorm(mlp_part(layer.mlp, "mlp", middle), middle)[0]
    return out, torch.zeros_like(out)


def _parallel(layer, attend, x):  # type: ignore[no-untyped-def]
    attended = attend(layer.input_layernorm(x)[0])
    return mlp_part(layer.mlp, "mlp", layer.post_attention_layernorm(x)[0]), attended + x


def _window(model: Decoder, layer: DecoderLayer, window: int) -> None:
    layer.self_attn.scoring = layer.self_attn.scoring._replace(window=window)


def _late_positions(model: Decoder, layer: DecoderLayer) -> None:
    """RoPE of tokens in cached steps is one position ahead."""

    def place(attention, qkv, batch, cache, rope, tiles=None):  # type: ignore[no-untyped-def]
        if batch.max_query_len == 1:
            batch = replace(batch, rope_rows=batch.rope_rows + 1)
        return Attention.place(attention, qkv, batch, cache, rope, tiles)

    layer.self_attn.place = MethodType(place, layer.self_attn)


def _positions_not_added(model: Decoder, layer: DecoderLayer) -> None:
    model.embed = lambda ids, positions, *_: model.embed_tokens(ids)


def _shifted_positions(model: Decoder, layer: DecoderLayer) -> None:
    embed = model.embed
    model.embed = lambda ids, positions, *rest: embed(ids, positions + 1, *rest)


def _untied_head(model: Decoder, layer: DecoderLayer) -> None:
    weight = model.embed_tokens.weight.flip(1).clone()
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)


def _scaled_logits(model: Decoder, layer: DecoderLayer) -> None:
    model.lm_head.weight.mul_(0.37)


def _square_parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.t() for part in tensor.chunk(3)])


def _conv_layout(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of [in, out] taken for [out, in]."""
    return tensor.t().contiguous().view(tensor.shape)


def _bias(path: str, factor: float) -> Plant:
    return _weight(f"{path}.bias", lambda bias: factor * bias)


_ROPE_TWICE = _rotary(lambda cos, sin: (cos * cos - sin * sin, 2 * sin * cos))
_ROPE_NONE = _rotary(lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)))
_GPT2 = ("gpt2",)
_LLAMA = ("llama",)
_ALL = ("llama", "qwen2", "gpt2")
_BIASES = (("attention_bias", True), ("mlp_bias", True))
_TIED = (("tie_word_embeddings", True),)
_MHA = (("num_key_value_heads", 4),)
_WINDOW = (("use_sliding_window", True), ("sliding_window", 5), ("max_window_layers", 0))

BUGS: dict[str, Bug] = {
    # 1 positions
    "rope_twice": Bug("rope_twice", _ROPE_TWICE),
    "rope_missing": Bug("rope_missing", _ROPE_NONE),
    "rope_base": Bug("rope_base", _other_rope(theta=5e5)),
    "rope_odd_base": Bug("rope_base", _other_rope(theta=31234.0)),
    "rope_style": Bug("rope_style", _rows(_paired)),
    "rope_scaling": Bug("rope_scaling", _other_rope(scaling="linear", factor=4.0)),
    "rope_position": Bug("rope_position", _late_positions, decode=True),
    "positions_shifted": Bug("positions_shifted", _shifted_positions, _GPT2),
    "positions_missing": Bug("positions_missing", _positions_not_added, _GPT2),
    # 2, 3 the feed-forward
    "gate_up_swapped": Bug("gate_up_swapped", _gate_up_swapped),
    "activation_branch": Bug("activation_branch", _bent(lambda gate, up: gate * F.silu(up))),
    "activation_both": Bug("activation_branch", _bent(lambda gate, up: F.silu(gate) * F.silu(up))),
    "activation": Bug("activation", _bent(lambda gate, up: F.gelu(gate) * up)),
    "activation_plain": Bug("activation", _set("mlp.activation", "relu"), _GPT2),
    "activation_near": Bug("activation", _set("mlp.activation", "gelu"), _GPT2),
    # 4 norms
    "norm_eps": Bug("norm_eps", _set("post_attention_layernorm.eps", 1e-3), _ALL),
    "norm_odd_eps": Bug("norm_eps", _set("post_attention_layernorm.eps", 3.3e-3), _ALL),
    "norm_kind": Bug("norm_kind", _norm("input_layernorm", _other_kind), _ALL),
    "norm_offset": Bug("norm_offset", _weight("input_layernorm.weight", lambda w: w + 1)),
    "norm_missing": Bug("norm_placement", _norm("post_attention_layernorm", lambda norm, x: x), _ALL),
    "norm_post": Bug("norm_placement", _layer(_post_norm), _ALL),
    "norm_parallel": Bug("norm_placement", _layer(_parallel), _ALL),
    # 5 the mask
    "mask_missing": Bug("mask", attending(causal=False), _ALL),
    "mask_ahead": Bug("mask", attending(ahead=1), _ALL),
    "window_off_by_one": Bug("window", partial(_window, window=6), ("qwen2",), _WINDOW),
    "window_missing": Bug("window", partial(_window, window=0), ("qwen2",), _WINDOW),
    "window_extra": Bug("window", partial(_window, window=7), _ALL),
    # 6 residuals
    "residual_missing": Bug("residual_missing", _layer(_no_attention_residual), _ALL),
    "residual_missing_mlp": Bug("residual_missing", _layer(_no_mlp_residual), _ALL),
    "residual_scale": Bug("residual_scale", _layer(_scaled_residual), _ALL),
    # 7 biases
    "qkv_bias_missing": Bug("qkv_bias_missing", _bias("self_attn.qkv_proj", 0), ("qwen2", "gpt2")),
    "qkv_bias_doubled": Bug("qkv_bias_doubled", _bias("self_attn.qkv_proj", 2), ("qwen2", "gpt2")),
    "o_bias_missing": Bug("o_bias_missing", _bias("self_attn.o_proj", 0), _GPT2),
    "o_bias_doubled": Bug("o_bias_doubled", _bias("self_attn.o_proj", 2), _GPT2),
    "mlp_bias_missing": Bug("mlp_bias_missing", _bias("mlp.down_proj", 0), _GPT2),
    "mlp_bias_missing_up": Bug("mlp_bias_missing", _bias("mlp.up_proj", 0), _GPT2),
    "mlp_bias_missing_gated": Bug("mlp_bias_missing", _bias("mlp.gate_up_proj", 0), _LLAMA, _BIASES),
    "mlp_bias_doubled": Bug("mlp_bias_doubled", _bias("mlp.up_proj", 2), _GPT2),
    # 8 layouts
    "o_transposed": Bug("weight_transposed", _weight("self_attn.o_proj.weight", torch.t), _ALL),
    "qkv_transposed": Bug("weight_transposed", _weight("self_attn.qkv_proj.weight", _square_parts), _GPT2),
    "qkv_conv_layout": Bug("weight_transposed", _weight("self_attn.qkv_proj.weight", _conv_layout), _GPT2),
    "down_conv_layout": Bug("weight_transposed", _weight("mlp.down_proj.weight", _conv_layout), _ALL),
    # 9 heads
    "head_order_fused": Bug("head_order", _rows(_per_group), _ALL),
    "head_order_groups": Bug("head_order", _cyclic_groups),
    "head_order_reversed": Bug("head_order", _rows(_reversed_heads), _ALL),
    "head_order_blocks": Bug("head_order", _rows(_key_first), _LLAMA, _MHA),
    "head_order_twice": Bug("head_order", _rows(partial(_paired, back=True))),
    # and scales, and the head
    "attention_scale_missing": Bug("attention_scale", attending(scale=lambda width: 1.0), _ALL),
    "attention_scale_twice": Bug("attention_scale", attending(scale=lambda width: 1 / width), _ALL),
    "head_untied": Bug("head_untied", _untied_head, _ALL, _TIED),
    "logit_scale": Bug("logit_scale", _scaled_logits, _LLAMA),
}
