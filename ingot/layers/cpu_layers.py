"""A decode step of one token on a CPU: all layers in one call of a kernel of ours.

layers = CpuLayers.of(decoder, caches)         # None: such a decoder is computed module by module
x = layers.normed(hidden, batch)               # after the final norm
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.cpu.layers_text import LAYER_WORDS, PRODUCTS, SHARED_WORDS, LayerShape, layers_text
from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu
from ingot.kernels.cpu.panel_products import Panels, RowsBuffer, product_arguments, tiles
from ingot.kernels.cpu.product_text import LANES, Packing
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.mlp import GatedMLP
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels


class CpuLayers:
    """Arguments of a step, made once: what the kernel reads and the buffers between its parts."""

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], shape: LayerShape, panels: list[list[Panels]]
    ) -> None:
        config, dtype = decoder.config, torch.float32
        qkv = config.q_size + 2 * config.kv_size
        sizes = {
            "hidden": shape.hidden,
            "normed": shape.hidden,
            "qkv": -(-qkv // LANES) * LANES,
            "attended": -(-config.q_size // LANES) * LANES,
            "gate_up": 2 * shape.inner,
            "inner": shape.inner,
        }
        self._buffers = {name: torch.zeros(1, size, dtype=dtype) for name, size in sizes.items()}
        self._scores = torch.zeros(config.num_heads, 0, dtype=dtype)
        self._held = [decoder, caches]  # whose tensors are read
        self._rows = RowsBuffer.of([one for own in panels for one in own], 1)
        self._met = torch.zeros(32, dtype=torch.int64)  # threads at barriers; the rest keeps others away
        shared = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        shared["met"] = self._met.data_ptr()
        shared |= {"layers": len(panels), "final_norm": decoder.norm.weight.data_ptr()}
        words = [shared.get(name, 0) for name in SHARED_WORDS]
        for index, own in enumerate(panels):
            words += self._layer(decoder, index, caches[index], own)
        self._words = np.array(words, dtype=np.int64)
        self._launch = _compiled(tuple(one.packing for one in panels[0]), shape)

    def _layer(self, decoder: Decoder, index: int, cached: LayerCache, own: list[Panels]) -> list[int]:
        layer, table = decoder.layers[index], decoder.rope_table(index)
        assert isinstance(layer, DecoderLayer)
        assert table is not None
        norms = (layer.self_attn.q_norm, layer.self_attn.k_norm)
        found = {
            "norm": layer.input_layernorm.weight.data_ptr(),
            "mlp_norm": layer.post_attention_layernorm.weight.data_ptr(),
            "keys": cached.keys.data_ptr(),
            "values": cached.values.data_ptr(),
            "table": table.data_ptr(),
            "window": decoder.config.window(index),
        }
        found |= {
            name: norm.weight.data_ptr()
            for name, norm in zip(("q_norm", "k_norm"), norms, strict=True)
            if norm is not None
        }
        words = [found.get(name, 0) for name in LAYER_WORDS]
        buffers = self._buffers
        ends = (
            (buffers["normed"], None, buffers["qkv"]),
            (buffers["attended"], buffers["hidden"], buffers["hidden"]),
            (buffers["normed"], None, buffers["gate_up"]),
            (buffers["inner"], buffers["hidden"], buffers["hidden"]),
        )
        for panels, (x, residual, y) in zip(own, ends, strict=True):
            rows = self._rows if panels.packing.rounds else None
            words += product_arguments(x, panels, residual, y, rows)
        return words

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

    @staticmethod
    def takes(batch: ForwardBatch) -> bool:
        """Whether a step is one token whose logits are wanted and that nobody observes."""
        one = len(batch.positions) == len(batch.logits_indices) == len(batch.seq_lens) == 1
        return one and batch.encoded is None and batch.observer is None and int(batch.slot_mapping) >= 0

    def normed(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The embedded token [1, hidden_size] → after the final norm; overwritten by the next step."""
        self._buffers["hidden"].copy_(hidden)
        length = int(batch.seq_lens)
        if self._scores.shape[1] < length + LANES:
            self._scores = torch.zeros(len(self._scores), -(-2 * length // LANES) * LANES + 16 * LANES)
        step = {
            "scores": self._scores.data_ptr(),
            "score_stride": self._scores.shape[1],
            "rope_row": int(batch.rope_rows),
            "slot": int(batch.slot_mapping),
            "length": length,
            "blocks": batch.block_tables.data_ptr(),
        }
        for name, value in step.items():
            self._words[SHARED_WORDS.index(name)] = value
        self._met.zero_()
        self._launch(self._words.ctypes.data, torch.get_num_threads())
        return self._buffers["normed"]


def _panels(layer: DecoderLayer) -> list[Panels]:
    """Of the layer's products in the kernel's order; empty where it cannot read one."""
    mlp = layer.mlp
    if not isinstance(mlp, GatedMLP):
        return []
    attention = layer.self_attn
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    schemes = [linear.scheme for linear in products]
    found = [one.panels for one in schemes if isinstance(one, (InPanels, Int8InPanels)) and not one.ordered]
    return found if len(found) == len(PRODUCTS) else []


def _shape(decoder: Decoder, caches: Sequence[LayerCache]) -> LayerShape | None:
    config, cached = decoder.config, caches[0]
    if not _plain(config) or cached.scales is not None or cached.keys.dtype != torch.float32:
        return None
    if decoder.dtype != torch.float32 or cached.keys.device.type != "cpu" or cached.keys.stride(3) != 1:
        return None
    assert config.rope is not None
    block, head, token = cached.keys.stride()[:3]
    return LayerShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary=config.rope.dim,
        eps=config.norm_eps,
        scale=config.attention_scale,
        qk_norm=config.qk_norm,
        block_size=cached.block_size,
        strides=(block, head, token),
    )


def _plain(config: DecoderConfig) -> bool:
    """Whether layers are LLaMA's, perhaps with biases, windows and norms of heads."""
    others = (config.logn_length, config.attention_softcap, config.post_norms, config.crosses)
    return config.norm == "rms_norm" and config.mlp == "silu_gated" and bool(config.rope) and not any(others)


@cache
def _compiled(packings: tuple[Packing, ...], shape: LayerShape) -> Launch:
    cpu = host_cpu()
    assert cpu is not None
    own = [tiles(packing) for packing in packings]
    return compiled(layers_text(packings, own, shape, permutes=cpu.avx512), "layers")
