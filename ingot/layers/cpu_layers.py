"""A decode step of a few requests on a CPU: all layers in one call of a kernel of ours.

layers = CpuLayers.of(decoder, caches)         # None: such a decoder is computed module by module
x = layers.normed(hidden, batch)               # after the final norm
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.cpu.layer_words import LAYER_WORDS, SHARED_WORDS, CacheShape, CpuLayerShape
from ingot.kernels.cpu.layers_text import layers_text
from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu
from ingot.kernels.cpu.panel_packing import LANES, PanelPacking
from ingot.kernels.cpu.panel_products import Panels, RowsBuffer, product_arguments, tiles
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear
from ingot.layers.mlp import GatedMLP
from ingot.layers.norm import Norm
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels

MOST_ROWS = 64  # of a step in one call
_TILE_ROWS = 4  # of several rows' products: one more kernel to compile
_PRODUCT_ENDS = {  # each product's input, residual and output
    "qkv": ("normed", "", "qkv"),
    "output": ("attended", "hidden", "hidden"),
    "query": ("normed", "", "query"),
    "cross_output": ("attended", "hidden", "hidden"),
    "up": ("normed", "", "up"),
    "down": ("inner", "hidden", "hidden"),
}


class CpuLayers:
    """Arguments of steps, made once for a number of rows: what the kernel reads and the buffers between its
    parts.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], shape: CpuLayerShape, panels: list[list[Panels]]
    ) -> None:
        self._decoder, self._caches, self._shape, self._panels = decoder, caches, shape, panels
        self._packings = tuple(one.packing for one in panels[0])
        self._scores = torch.zeros(0, 0)
        self._met = torch.zeros(32, dtype=torch.int64)  # threads at barriers; the rest keeps others away
        self._buffers: dict[str, torch.Tensor] = {}
        self._steps: dict[int, _Step] = {}
        self._make_buffers(1)
        self._step_of(1)

    def _make_buffers(self, rows: int) -> None:
        """For at most so many rows; what rows beyond a step's hold is finite."""
        self._buffers = {name: torch.zeros(rows, width) for name, width in self._shape.widths.items()}
        every = [one for own in self._panels for one in own]
        self._quantized = RowsBuffer.of(every, rows)
        floats = any(not packing.rounds for packing in self._packings)
        widest = max(one.in_features for one in every) if floats and rows > 1 else 0
        self._in_panels = torch.zeros(rows * widest)
        self._steps.clear()

    def _step_of(self, rows: int) -> _Step:
        """The arguments of a step of so many rows."""
        tile_rows = 1 if rows == 1 else _TILE_ROWS
        filled = -(-rows // tile_rows) * tile_rows
        if filled > len(self._buffers["hidden"]):
            self._make_buffers(filled)
        if filled not in self._steps:
            words = [*self._shared_words(), *self._layer_words(filled, tile_rows)]
            launch = _compiled(self._packings, tile_rows, self._shape)
            self._steps[filled] = _Step(np.array(words, dtype=np.int64), launch, filled)
        return self._steps[filled]

    def _shared_words(self) -> list[int]:
        shared = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        shared |= {"layers": len(self._panels), "met": self._met.data_ptr()}
        shared |= _norm_words("final_norm", self._decoder.norm)
        return [shared.get(name, 0) for name in SHARED_WORDS]

    def _layer_words(self, filled: int, tile_rows: int) -> Iterator[int]:
        decoder, buffers = self._decoder, self._buffers
        for index, (layer, cached) in enumerate(zip(decoder.layers, self._caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            found = _words_of(layer, cached, decoder.rope_table(index), decoder.config.window(index))
            yield from (found.get(name, 0) for name in LAYER_WORDS)
            for name, panels in zip(self._shape.products, self._panels[index], strict=True):
                x, residual, y = _PRODUCT_ENDS[name]
                yield from product_arguments(
                    buffers[x],
                    panels,
                    buffers.get(residual),
                    buffers[y],
                    self._quantized if panels.packing.rounds else None,
                    count=filled,
                    rows=tile_rows,
                    in_panels=self._in_panels if tile_rows > 1 else None,
                )

    @classmethod
    def of(cls, decoder: Decoder, caches: Sequence[LayerCache]) -> CpuLayers | None:
        """None where a layer, the cache or this processor is not of the kind that the kernel computes."""
        shape, cpu = _shape(decoder, caches), host_cpu()
        if shape is None or not shape.fits or cpu is None:
            return None
        panels = [_panels(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        if len({tuple(one.packing for one in own) for own in panels}) != 1:
            return None
        return cls(decoder, caches, shape, panels) if all(map(len, panels)) else None

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether a step has one token of each request, all logits are wanted and nobody observes."""
        rows = len(batch.positions)
        each = batch.max_query_len == 1 and rows == len(batch.logits_indices) == len(batch.seq_lens)
        if not each or batch.probes or not 0 < rows <= MOST_ROWS or batch.observer is not None:
            return False
        if (batch.encoded is None) != (self._shape.encoded is None):
            return False
        if batch.encoded is not None and int(batch.encoded.lens.min()) < 1:
            return False
        return int(batch.slot_mapping.min()) >= 0

    def normed(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The embedded tokens [T, hidden_size] → after the final norm; overwritten by the next step."""
        rows, threads = len(hidden), torch.get_num_threads()
        step = self._step_of(rows)
        own = self._buffers["hidden"]
        own[:rows] = hidden
        own[rows : step.filled] = 0
        lengths = [batch.seq_lens] + ([] if batch.encoded is None else [batch.encoded.lens])
        longest = max(int(one.max()) for one in lengths)
        if len(self._scores) < threads or self._scores.shape[1] < longest + LANES:
            self._scores = torch.zeros(threads, -(-2 * longest // LANES) * LANES + 16 * LANES)
        found = {
            "rows": rows,
            "scores": self._scores.data_ptr(),
            "score_stride": self._scores.shape[1],
            "rope_rows": batch.rope_rows.data_ptr(),
            "slots": batch.slot_mapping.data_ptr(),
            "lengths": batch.seq_lens.data_ptr(),
            "blocks": batch.block_tables.data_ptr(),
            "block_stride": batch.block_tables.stride(0),
        }
        if batch.encoded is not None:
            found["encoded_lengths"] = batch.encoded.lens.data_ptr()
            found["encoded_blocks"] = batch.encoded.block_tables.data_ptr()
            found["encoded_stride"] = batch.encoded.block_tables.stride(0)
        for name, value in found.items():
            step.words[SHARED_WORDS.index(name)] = value
        self._met.zero_()
        step.launch(step.words.ctypes.data, threads)
        return self._buffers["normed"][:rows]


class _Step:
    """``filled``: rows of whole tiles, whose buffers the kernel reads."""

    def __init__(self, words: np.ndarray, launch: Launch, filled: int) -> None:
        self.words, self.launch, self.filled = words, launch, filled


def _words_of(
    layer: DecoderLayer, cached: LayerCache, table: torch.Tensor | None, window: int
) -> dict[str, int]:
    found = {
        "keys": cached.keys.data_ptr(),
        "values": cached.values.data_ptr(),
        "table": 0 if table is None else table.data_ptr(),
        "window": window,
    }
    found |= _norm_words("norm", layer.input_layernorm)
    found |= _norm_words("mlp_norm", layer.post_attention_layernorm)
    attention = layer.self_attn
    if attention.q_norm is not None and attention.k_norm is not None:
        found["q_norm"] = attention.q_norm.weight.data_ptr()
        found["k_norm"] = attention.k_norm.weight.data_ptr()
    if layer.encoder_attn is not None:
        assert cached.encoded is not None
        found |= _norm_words("cross_norm", layer.encoder_attn_layernorm)
        found["encoded_keys"] = cached.encoded.keys.data_ptr()
        found["encoded_values"] = cached.encoded.values.data_ptr()
    return found


def _norm_words(name: str, norm: Norm) -> dict[str, int]:
    bias = norm.shift
    return {name: norm.weight.data_ptr(), f"{name}_bias": 0 if bias is None else bias.data_ptr()}


def _panels(layer: DecoderLayer) -> list[Panels]:
    """Of the layer's products in the kernel's order; empty where it cannot read one."""
    products = _products(layer)
    schemes = [linear.scheme for linear in products]
    found = [one.panels for one in schemes if isinstance(one, (InPanels, Int8InPanels)) and not one.ordered]
    return found if len(found) == len(products) else []


def _products(layer: DecoderLayer) -> list[Linear]:
    mlp, attention, cross = layer.mlp, layer.self_attn, layer.encoder_attn
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    crossed = [] if cross is None else [cross.q_proj, cross.o_proj]
    return [attention.qkv_proj, attention.o_proj, *crossed, up, mlp.down_proj]


def _shape(decoder: Decoder, caches: Sequence[LayerCache]) -> CpuLayerShape | None:
    config = decoder.config
    own, encoded = _cache_shape(caches[0]), _cache_shape(caches[0].encoded)
    if not _plain(config) or decoder.dtype != torch.float32 or own is None:
        return None
    if config.crosses and encoded is None:
        return None
    assert config.mlp != "gelu_tanh_gated"
    return CpuLayerShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary=config.rope.dim if config.rope else 0,
        eps=config.norm_eps,
        scale=config.attention_scale,
        qk_norm=config.qk_norm,
        norm_bias=config.norm == "layer_norm",
        mlp=config.mlp,
        cache=own,
        encoded=encoded if config.crosses else None,
    )


def _cache_shape(cached: LayerCache | None) -> CacheShape | None:
    """None: a cache that the kernel does not read."""
    if cached is None or cached.scales is not None or cached.keys.dtype != torch.float32:
        return None
    if cached.keys.device.type != "cpu" or cached.keys.stride(3) != 1:
        return None
    block, head, token = cached.keys.stride()[:3]
    return CacheShape(cached.block_size, (block, head, token))


def _plain(config: DecoderConfig) -> bool:
    """Whether layers are like LLaMA's, GPT-2's or Whisper's, perhaps with windows and norms of heads."""
    others = (config.logn_length, config.attention_softcap, config.post_norms)
    return config.mlp != "gelu_tanh_gated" and not any(others)


@cache
def _compiled(packings: tuple[PanelPacking, ...], tile_rows: int, shape: CpuLayerShape) -> Launch:
    cpu = host_cpu()
    assert cpu is not None
    own = [{tile_rows: tiles(packing)[tile_rows]} for packing in packings]
    return compiled(layers_text(packings, own, shape, permutes=cpu.avx512), "layers")
