"""A decoder layer of a decode step, as the runtime runs it, beside PyTorch's operators."""

from __future__ import annotations

import torch
from torch import nn

from ingot.building.random_weights import random_decoder
from ingot.config.build_config import BuildConfig
from ingot.device import dtype_name
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.step_layout import StepLayout
from ingot.measure.bench.kernel_bench.kernel_case import graph_us
from ingot.measure.bench.kernel_bench.kernel_cases import BLOCK, KernelSetting, turns_at
from ingot.measure.bench.kernel_bench.torch_layer import torch_layer
from ingot.measure.side.step_work import layer_weights
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.runner import make_caches

_VOCABULARY = 512
_LEAST_LAYERS, _MOST_LAYERS = 4, 16


class LayerStack:
    """``2 depth`` random layers of a model's shape; ``depth`` of them are far larger than the L2 cache. A
    layer's time is the difference between stacks of both depths: embedding and head do not count.

    Attributes:
        num_weights, bytes: of one layer's products.
    """

    def __init__(self, setting: KernelSetting) -> None:
        config, inputs = setting.config, setting.inputs
        self.num_weights = layer_weights(config)
        self.depth = max(_LEAST_LAYERS, inputs.copies(self.num_weights, _MOST_LAYERS))
        self.bytes = self.num_weights * inputs.dtype.itemsize
        self._setting = setting
        small = config.replace(num_layers=2 * self.depth, vocab_size=_VOCABULARY)
        build = BuildConfig(dtype_name(inputs.dtype), max(setting.rows), setting.max_seq_len)  # type: ignore[arg-type]
        self._model = random_decoder(small, build, setting.plan, inputs.device, inputs.dtype)

    @torch.inference_mode()
    def ours(self, rows: int) -> list[float]:
        """Microseconds of one layer in the runtime's step of ``rows`` requests, one value per replay."""
        whole = self._stack_us(rows, 2 * self.depth)
        half = self._stack_us(rows, self.depth)
        return [(a - b) / self.depth for a, b in zip(whole, half, strict=True)]

    @torch.inference_mode()
    def torch(self, rows: int) -> list[float]:
        """The same with PyTorch's operators over contiguous caches."""
        s, config = self._setting, self._setting.config
        shape = (self.depth, rows, config.num_kv_heads, s.seen, config.head_dim)
        keys, values = s.inputs.normal(*shape), s.inputs.normal(*shape)
        hidden = s.inputs.normal(rows, config.hidden_size)
        positions = s.inputs.long(torch.full((rows,), s.context - 1))
        rotary = self._model.rotary
        turns = None if rotary is None else turns_at(rotary.table, positions, s.inputs.dtype)

        def one(i: int) -> object:
            layer = self._model.layers[i % self.depth]
            assert isinstance(layer, DecoderLayer)
            cached = keys[i % self.depth], values[i % self.depth]
            return torch_layer(config, layer, hidden, *cached, positions, turns)

        return graph_us(one, 2 * self.depth)

    def _stack_us(self, rows: int, depth: int) -> list[float]:
        """Microseconds of a step over the first ``depth`` layers, with embedding and a small head."""
        model, layers = self._model, self._model.layers
        try:
            model.layers = nn.ModuleList(list(layers)[:depth])
            batch, forward = self._step(model, rows, depth)
            return graph_us(lambda _: forward(batch), 2)
        finally:
            model.layers = layers

    def _step(self, model: Decoder, rows: int, depth: int) -> tuple[ForwardBatch, Forward]:
        """A decode step of ``rows`` requests with ``context`` tokens each, and its forward pass."""
        s, device = self._setting, self._setting.inputs.device
        width = -(-s.context // BLOCK)
        caches = make_caches(model, rows * width, BLOCK, device, s.inputs.dtype)[:depth]
        for cache in caches:
            cache.keys.normal_()
            cache.values.normal_()
        layout = StepLayout.of(
            [s.context - 1] * rows,
            [1] * rows,
            torch.randperm(rows * width).view(rows, width).tolist(),
            BLOCK,
            input_ids=torch.randint(_VOCABULARY, (rows,)).tolist(),
        )
        arrivals = torch.zeros(rows * caches[0].num_kv_heads, dtype=torch.int32, device=device)
        batch = ForwardBatch.of(layout, device, max_seq_len=s.max_seq_len, arrivals=arrivals)
        fused = device.type == "cuda" and s.inputs.dtype.itemsize == 2
        return batch, Forward(model, caches, fused=fused)
