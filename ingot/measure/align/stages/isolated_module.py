"""One module of the engine run on the reference's input, with a cache of its own.

Its output differs from the reference by this module alone, whatever happened before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ingot.layers.attention import Attention
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache, Spliced
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import RMSNorm
from ingot.measure.align.stages.isolated_encoder import (
    CROSS_PARTS,
    cross_attended_of,
    encoder_source,
    isolated_encoder,
)
from ingot.measure.align.stages.stage_names import FEATURES, StageFile, kind_of, layer_of
from ingot.runtime.step.one_layer import hidden_after, request_batch

_BLOCK = 64


class Isolated:
    """Runs an engine's modules on inputs from a file of stages, in the engine's dtype.

    ``on_grid``: an input that the module rounds to few bits is rounded before, by the rule of plain_rows.py,
    so that no value is close to the middle between two and both sides have the same quantized rows.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        reference: StageFile,
        *,
        on_grid: bool = False,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.reference = reference
        self.on_grid = on_grid

    @torch.inference_mode()
    def run(self, step: int, stage: str) -> torch.Tensor | None:
        """The step's tokens at a place, on the host, from the recorded place before it, or None."""
        layer, found = layer_of(stage), None
        if stage.startswith("encoder.") or kind_of(stage) in CROSS_PARTS:
            found = isolated_encoder(self.model, stage, self._get)
        elif layer is not None:
            found = self._inside(step, layer, kind_of(stage))
        elif stage == "embedding":
            ids = torch.tensor(self.reference.ids(step), device=self.device)
            found = self.model.embed(ids, self._positions(step), self._spliced(step, ids))
        elif stage not in FEATURES:
            x = self._get(step, self._source(stage), self.model.lm_head if stage == "logits" else None)
            if x is not None:
                is_norm = stage == "final_norm"
                found = self.model.norm(x)[0] if is_norm else self.model.capped(self.model.lm_head(x))
        return None if found is None else found.to("cpu")

    @torch.inference_mode()
    def module(self, step: int, stage: str) -> torch.Tensor | None:
        """The same of a whole module: attention and an MLP from the norm before them, a layer (``layers.3``)
        from its input.
        """
        layer, kind = layer_of(stage), kind_of(stage)
        if layer is None or kind not in ("attention", "mlp", str(layer)):
            return self.run(step, stage)
        found = self._whole(step, layer) if kind == str(layer) else self._module(step, layer, kind)
        return None if found is None else found.to("cpu")

    def inputs(self, step: int, stage: str) -> torch.Tensor | None:
        """The reference's input of the stage's module; token ids for the embedding; for attention and a whole
        layer (``layers.3``) those of all tokens so far.
        """
        layer, kind = layer_of(stage), kind_of(stage)
        if stage in FEATURES:
            return None
        source = encoder_source(self.model, stage)
        if source is not None:
            return self.reference.get(step, source)
        if kind == "attention":
            return self.reference.so_far(step, f"layers.{layer}.input_norm")
        if stage == f"layers.{layer}":
            if self.model.config.crosses:  # the encoder's outputs are not among its inputs
                return None
            return self.reference.so_far(step, self._source(f"{stage}.input_norm"))
        if stage == "embedding":
            return torch.tensor(self.reference.ids(step))
        return self.reference.get(step, self._source(stage))

    def _source(self, stage: str) -> str:
        """The stage that a whole module reads."""
        layer = layer_of(stage)
        if layer is None:
            last = f"layers.{len(self.model.layers) - 1}.output"
            return {"final_norm": last, "logits": "final_norm"}[stage]
        before = "embedding" if layer == 0 else f"layers.{layer - 1}.output"
        names = {"input_norm": before, "residual": "attention", "post_norm": "residual"}
        names |= {"cross_norm": "residual", "cross_attention": "cross_norm", "mlp": "post_norm"}
        names |= {"cross_residual": "cross_attention", "output": "mlp"}
        if self.model.config.crosses:
            names["post_norm"] = "cross_residual"
        name = names[kind_of(stage)]
        return name if name == before else f"layers.{layer}.{name}"

    def _spliced(self, step: int, ids: torch.Tensor) -> Spliced | None:
        """The reference's rows of a picture, at its placeholders."""
        rows = self._get(0, "encoder.projector") if self.model.config.splices and not step else None
        if rows is None:
            return None
        encoder = self.model.config.encoder
        assert encoder is not None
        places = (ids == encoder.placeholder_id).nonzero().flatten()[: len(rows)]
        slots = torch.full_like(ids, -1)
        slots[places] = torch.arange(len(rows), device=ids.device)
        return Spliced(slots, rows)

    def _inside(self, step: int, index: int, kind: str) -> torch.Tensor | None:
        layer, name = self.model.layers[index], f"layers.{index}"
        assert isinstance(layer, DecoderLayer)
        linear = reader_of(layer, kind)
        before = {"attention": "attended", "mlp": "inner", "cross_attention": "cross_attended"}.get(kind)
        last = None if before is None else self._get(step, f"{name}.{before}", linear)
        if last is not None and linear is not None:
            return linear(last)
        if kind in (*_ATTENTION, "mlp", "inner"):
            return self._module(step, index, kind)
        x = self._get(step, self._source(f"{name}.{kind.replace('attended', 'attention')}"), linear)
        if x is None:
            return None
        if kind == "input_norm":
            return layer.input_layernorm(x)[0]
        if kind == "post_norm":
            return layer.post_attention_layernorm(x)[0]
        if kind == "cross_norm":
            return layer.encoder_attn_layernorm(x)[0]
        if kind in ("cross_attended", "cross_attention"):
            keys, values = (self._get(0, f"{name}.cross_{part}") for part in ("keys", "values"))
            if layer.encoder_attn is None or keys is None or values is None:
                return None
            attended = cross_attended_of(layer.encoder_attn, x, keys, values)
            return attended if kind == "cross_attended" else layer.encoder_attn.o_proj(attended)
        return self._joined(step, index, kind, x)

    def _module(self, step: int, index: int, kind: str) -> torch.Tensor | None:
        """Attention or an MLP from the norm before it, with or without its last product."""
        layer, name = self.model.layers[index], f"layers.{index}"
        assert isinstance(layer, DecoderLayer)
        if kind in _ATTENTION:
            read = self.reference.so_far(step, f"{name}.input_norm")
            x = self._given(read, layer.self_attn.qkv_proj)
            if x is None:
                return None
            return self._cached(partial(attention_part, layer.self_attn, kind), x, step, index)
        x = self._get(step, f"{name}.post_norm", up_of(layer.mlp))
        return None if x is None else mlp_part(layer.mlp, kind, x)

    def _joined(self, step: int, index: int, kind: str, branch: torch.Tensor) -> torch.Tensor | None:
        """The hidden states after a branch joins them, which the next norm computes."""
        before = "cross_residual" if self.model.config.crosses and kind == "output" else "residual"
        name = f"layers.{index}.{before}"
        name = self._source(f"layers.{index}.input_norm") if kind == "residual" else name
        stream = self._get(step, name)
        if stream is None:
            return None
        layers, norm = self.model.layers, self.model.norm
        if kind in ("residual", "cross_residual"):
            norm = layers[index].post_attention_layernorm  # type: ignore[assignment]
        elif index + 1 < len(layers):
            norm = layers[index + 1].input_layernorm  # type: ignore[assignment]
        post = layers[index].mlp_norm if kind == "output" else layers[index].self_attn_norm
        if isinstance(post, RMSNorm):
            branch = post(branch)[0]
        return norm(branch, stream)[1]

    def _whole(self, step: int, index: int) -> torch.Tensor | None:
        stream = self._given(self.inputs(step, f"layers.{index}"))
        if stream is None:
            return None
        layer = self.model.layers[index]
        assert isinstance(layer, DecoderLayer)
        return self._cached(partial(hidden_after, layer), stream, step, index)

    def _cached(
        self, run: Callable[..., torch.Tensor], hidden: torch.Tensor, step: int, index: int
    ) -> torch.Tensor:
        """A layer's tokens before the step as a prompt, then the step's own, over a cache of their own."""
        config, start, end = self.model.config, self.reference.start(step), hidden.shape[0]
        shape = (-(-end // _BLOCK), config.num_kv_heads, _BLOCK, config.head_dim)
        cache = LayerCache.zeros(*shape, hidden.dtype, hidden.device)
        rope = self.model.rope_table(index)
        if start:
            run(hidden[:start], self._batch(0, start), cache, rope)
        return run(hidden[start:], self._batch(start, end), cache, rope)

    def _batch(self, start: int, end: int) -> ForwardBatch:
        positions = torch.arange(start, end, device=self.device)
        offset = self.model.rope_offset(len(self.reference.ids(0)))
        return request_batch(positions + offset, end, -(-end // _BLOCK), _BLOCK, max_seq_len=end)

    def _positions(self, step: int) -> torch.Tensor:
        start = self.reference.start(step)
        return torch.arange(start, start + len(self.reference.ids(step)), device=self.device)

    def _get(self, step: int, stage: str, reader: nn.Module | None = None) -> torch.Tensor | None:
        return self._given(self.reference.get(step, stage), reader)

    def _given(self, tensor: torch.Tensor | None, reader: nn.Module | None = None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return as_read(tensor.to(self.device), self.dtype, reader if self.on_grid else None)


def as_read(x: torch.Tensor, dtype: torch.dtype, reader: nn.Module | None) -> torch.Tensor:
    """A recorded stage as a module in ``dtype`` reads it; a ``reader`` that rounds gets it on its grid."""
    if isinstance(reader, Linear) and reader.scheme.rounds:
        x = reader.scheme.rounded(x if x.dtype == torch.float64 else x.float(), reader._parameters)
    return x.to(dtype)


def reader_of(layer: nn.Module, kind: str) -> Linear | None:
    """The linear layer that reads a stage's input, in a layer of a decoder or an encoder."""
    names = {"attended": "self_attn.qkv_proj", "attention": "self_attn.o_proj", "mlp": "mlp.down_proj"}
    names |= {"query": "self_attn.qkv_proj", "keys": "self_attn.qkv_proj"}
    names |= {"cross_attended": "encoder_attn.q_proj", "cross_attention": "encoder_attn.o_proj"}
    if kind == "inner":
        return up_of(layer.get_submodule("mlp"))
    found = layer.get_submodule(names[kind]) if kind in names else None
    assert found is None or isinstance(found, Linear)
    return found


def up_of(mlp: nn.Module) -> Linear:
    found = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.get_submodule("up_proj")
    assert isinstance(found, Linear)
    return found


_ATTENTION = ("query", "keys", "attended", "attention")


def attention_part(
    attention: Attention,
    kind: str,
    x: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    rope: torch.Tensor | None,
) -> torch.Tensor:
    """Of normalised states [T, hidden_size]: queries, keys as the cache holds them, the input of attention's
    last product (``attended``) or its output.
    """
    query = attention.place(attention.qkv_proj(x), batch, cache, rope)
    if kind == "query":
        return query.flatten(1)
    if kind == "keys":
        block, place = batch.slot_mapping // cache.block_size, batch.slot_mapping % cache.block_size
        return cache.keys[block, :, place].flatten(1)
    attended = attention.attend(query, batch, cache).flatten(1)
    return attended if kind == "attended" else attention.o_proj(attended)


def mlp_part(mlp: GatedMLP | MLP, kind: str, x: torch.Tensor) -> torch.Tensor:
    """Of normalised states [T, hidden_size]: the input of an MLP's down product (``inner``) or its output."""
    inner = mlp.activate(up_of(mlp)(x))
    return inner if kind == "inner" else mlp.down_proj(inner)
