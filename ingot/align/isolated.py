"""One module of the engine run on the reference's input.

Owns the way from a stage's name to a call of our module with a scratch cache. What comes out differs from the
reference by this module alone, whatever happened before it. Knows no verdict.

    got = Isolated(llm.engine.model, dtype, device, reference).run(step=0, stage="layers.3.mlp")
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ingot.align.isolated_encoder import CROSS_PARTS, cross_attention_of, encoder_source, isolated_encoder
from ingot.align.stages import LOG_MEL, StageFile, kind_of, layer_of
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import RMSNorm
from ingot.runtime.one_layer import hidden_after, request_batch

_BLOCK = 64
_Module = TypeVar("_Module", bound=nn.Module)


class Isolated:
    """Runs an engine's modules on inputs from a file of stages, in their own dtype or in fp32 copies."""

    def __init__(
        self, model: Decoder, dtype: torch.dtype, device: torch.device, reference: StageFile
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.reference = reference
        self._own = dtype
        self._copied: tuple[nn.Module, nn.Module] | None = None

    def widened(self) -> Isolated:
        """The same modules computing in fp32, each copied when it runs."""
        wide = Isolated(self.model, self.dtype, self.device, self.reference)
        wide.dtype = torch.float32
        return wide

    @torch.inference_mode()
    def run(self, step: int, stage: str) -> torch.Tensor | None:
        """The module's output for the step's tokens, on the host; None where the file lacks its input."""
        layer = layer_of(stage)
        if stage.startswith("encoder.") or kind_of(stage) in CROSS_PARTS:
            found = isolated_encoder(self.model, stage, self._get, self._cast)
        elif stage == LOG_MEL:
            found = None
        elif layer is None:
            found = self._outside(step, stage)
        elif stage == f"layers.{layer}":
            found = self._whole(step, layer)
        else:
            found = self._inside(step, layer, kind_of(stage))
        return None if found is None else found.to("cpu")

    def inputs(self, step: int, stage: str) -> torch.Tensor | None:
        """The reference's input of the stage's module, as the file has it; token ids for the embedding; for
        attention and for a whole layer (``layers.3``) those of all tokens so far.
        """
        layer, kind = layer_of(stage), kind_of(stage)
        if stage == LOG_MEL:
            return None
        source = encoder_source(self.model, stage)
        if source is not None:
            return self.reference.get(step, source)
        if kind == "attention":
            return self.reference.so_far(step, f"layers.{layer}.input_norm")
        if stage == f"layers.{layer}":
            if self.model.kind == "cross":  # what its input became is not among its inputs
                return None
            return self.reference.so_far(step, self._source(f"{stage}.input_norm"))
        if stage == "embedding":
            return torch.tensor(self.reference.ids(step))
        return self.reference.get(step, self._source(stage))

    def _source(self, stage: str) -> str:
        layer = layer_of(stage)
        if layer is None:
            last = f"layers.{len(self.model.layers) - 1}.output"
            return {"final_norm": last, "logits": "final_norm"}[stage]
        before = "embedding" if layer == 0 else f"layers.{layer - 1}.output"
        names = {"input_norm": before, "residual": "attention", "post_norm": "residual"}
        names |= {"cross_norm": "residual", "cross_attention": "cross_norm", "mlp": "post_norm"}
        names |= {"cross_residual": "cross_attention", "output": "mlp"}
        if self.model.kind == "cross":
            names["post_norm"] = "cross_residual"
        name = names[kind_of(stage)]
        return name if name == before else f"layers.{layer}.{name}"

    def _outside(self, step: int, stage: str) -> torch.Tensor | None:
        model = self.model
        if stage == "embedding":
            ids = torch.tensor(self.reference.ids(step), device=self.device)
            return model.embed(ids, self._positions(step))
        x = self._get(step, self._source(stage))
        if x is None:
            return None
        if stage == "final_norm":
            return self._cast(model.norm)(x)[0]
        return model.capped(self._cast(model.lm_head)(x))

    def _inside(self, step: int, index: int, kind: str) -> torch.Tensor | None:
        layer = self.model.layers[index]
        assert isinstance(layer, DecoderLayer)
        x = self._given(self.inputs(step, f"layers.{index}.{kind}"))
        if x is None:
            return None
        if kind == "attention":
            return self._cached(partial(attention_of, self._cast(layer.self_attn)), x, step)
        if kind == "mlp":
            return mlp_of(self._cast(layer.mlp), x)
        if kind == "input_norm":
            return self._cast(layer.input_layernorm)(x)[0]
        if kind == "post_norm":
            return self._cast(layer.post_attention_layernorm)(x)[0]
        if kind == "cross_norm":
            return self._cast(layer.encoder_attn_layernorm)(x)[0]
        if kind == "cross_attention":
            assert layer.encoder_attn is not None
            parts = (self._get(0, f"layers.{index}.cross_{part}") for part in ("keys", "values"))
            return cross_attention_of(self._cast(layer.encoder_attn), x, *parts)
        return self._joined(step, index, kind, x)

    def _joined(self, step: int, index: int, kind: str, branch: torch.Tensor) -> torch.Tensor | None:
        """The stream after a branch joins it, which the norm behind the branch computes."""
        before = "cross_residual" if self.model.kind == "cross" and kind == "output" else "residual"
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
            branch = self._cast(post)(branch)[0]
        return self._cast(norm)(branch, stream)[1]

    def _cast(self, module: _Module) -> _Module:
        """The module itself, or a copy in fp32; the last copy is kept for the next step."""
        if self.dtype == self._own:
            return module
        if self._copied is None or self._copied[0] is not module:
            self._copied = None
            self._copied = module, copy.deepcopy(module).to(self.dtype)
        found = self._copied[1]
        assert isinstance(found, type(module))
        return found

    def _whole(self, step: int, index: int) -> torch.Tensor | None:
        stream = self._given(self.inputs(step, f"layers.{index}"))
        if stream is None:
            return None
        layer = self.model.layers[index]
        assert isinstance(layer, DecoderLayer)
        return self._cached(partial(hidden_after, layer), stream, step)

    def _cached(self, run: Callable[..., torch.Tensor], hidden: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens before the step as a prompt, then the step's own, over a cache of their own."""
        config, start, end = self.model.config, self.reference.start(step), hidden.shape[0]
        shape = (-(-end // _BLOCK), config.num_kv_heads, _BLOCK, config.head_dim)
        cache = LayerCache.zeros(*shape, hidden.dtype, hidden.device)
        rope = None if self.model.rotary is None else self.model.rotary.table
        if start:
            run(hidden[:start], self._batch(0, start), cache, rope)
        return run(hidden[start:], self._batch(start, end), cache, rope)

    def _batch(self, start: int, end: int) -> ForwardBatch:
        """Tokens [start, end) of one request."""
        positions = torch.arange(start, end, device=self.device)
        offset = self.model.rope_offset(len(self.reference.ids(0)))
        return request_batch(positions, positions + offset, end, -(-end // _BLOCK), max_seq_len=end)

    def _positions(self, step: int) -> torch.Tensor:
        start = self.reference.start(step)
        return torch.arange(start, start + len(self.reference.ids(step)), device=self.device)

    def _get(self, step: int, stage: str) -> torch.Tensor | None:
        return self._given(self.reference.get(step, stage))

    def _given(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.device, self.dtype)


def attention_of(
    attention: Attention, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor | None
) -> torch.Tensor:
    """What attention adds to the hidden states, for normalised ones [T, hidden_size]."""
    query = attention.place(attention.qkv_proj(x), batch, cache, rope)
    added: torch.Tensor = attention.o_proj(attention.attend(query, batch, cache).flatten(1))
    return added


def mlp_of(mlp: GatedMLP | MLP, x: torch.Tensor) -> torch.Tensor:
    """What an MLP adds to the hidden states, for normalised ones [T, hidden_size]."""
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    added: torch.Tensor = mlp.down_proj(mlp.activate(up(x)))
    return added
