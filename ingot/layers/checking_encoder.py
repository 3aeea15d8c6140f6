"""The checking encoder of speech: log-mel frames to outputs, in plain PyTorch.

Owns the convolutions and the order of positions, layers and norm; a layer is checking.py's, without a mask.
Shares nothing with the modules that it is held against. Knows no engine.

    for stage in PlainSpeechEncoder(stack).stages(read, hooks): hidden = stage(hidden)    # features first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ingot.config.encoder import StackConfig
from ingot.layers.checking import Hooks, NormSpec, PlainAttention, PlainLayer, PlainMlp, ReadVector

Stage = Callable[[torch.Tensor], torch.Tensor]
_TAPS = 3  # frames that a convolution sees


@dataclass(frozen=True)
class PlainSpeechEncoder:
    """Two convolutions with GELU, the second over every other frame; positions; pre-norm layers; a norm."""

    stack: StackConfig
    name: str = "encoder"

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """What to compute one after another, [mels, frames] → [positions, hidden_size]: the front, each
        layer, the norm. ``read`` gives weights that no product has, when they are needed.
        """
        layers = [partial(self._layer, index, read, hooks) for index in range(self.stack.num_layers)]
        return [partial(self._front, read, hooks), *layers, partial(self._last, read, hooks)]

    def _front(self, read: ReadVector, hooks: Hooks, features: torch.Tensor) -> torch.Tensor:
        hidden = features.T
        for name, stride in (("conv1", 1), ("conv2", 2)):
            hidden = self._conv(name, hidden, stride, read, hooks)
        places = read(f"{self.name}.embed_positions.weight")[: len(hidden)]
        hidden = hooks.had("stream", hooks.round(hidden + places))
        hooks.see(f"{self.name}.embed_positions", hidden)
        return hidden

    def _last(self, read: ReadVector, hooks: Hooks, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hooks.had("norm", hooks.norm(self._norm(f"{self.name}.norm", read), hidden))
        hooks.see(f"{self.name}.norm", hidden)
        return hidden

    def _conv(self, name: str, x: torch.Tensor, stride: int, read: ReadVector, hooks: Hooks) -> torch.Tensor:
        """Frames [T, C] → [ceil(T / stride), hidden_size]: each sees one frame before and one behind it."""
        path = f"{self.name}.{name}"
        around = F.pad(x, (0, 0, 1, 1)).unfold(0, _TAPS, stride)  # [T / stride, C, taps]
        y = hooks.round(around.flatten(1) @ read(f"{path}.weight").flatten(1).T + read(f"{path}.bias"))
        y = hooks.had(name, y)
        hooks.see(path, y)
        return hooks.round(hooks.bend(y, "gelu"))

    def _layer(self, index: int, read: ReadVector, hooks: Hooks, hidden: torch.Tensor) -> torch.Tensor:
        name, heads = f"{self.name}.layers.{index}", self.stack.num_heads
        size = self.stack.hidden_size // heads
        attention = PlainAttention(
            name=f"{name}.self_attn",
            query_norm=None,
            key_norm=None,
            heads=heads,
            kv_heads=heads,
            head_dim=size,
            positions=torch.arange(len(hidden), device=hidden.device),
            scale=size**-0.5,
            causal=False,
        )
        layer = PlainLayer(
            name=name,
            input_norm=self._norm(f"{name}.input_layernorm", read),
            attention=attention,
            post_norm=self._norm(f"{name}.post_attention_layernorm", read),
            mlp=PlainMlp(name=f"{name}.mlp", activation=self.stack.activation, on=None),
        )
        return layer.run(hidden, hooks)

    def _norm(self, name: str, read: ReadVector) -> NormSpec:
        vectors = read(f"{name}.weight"), read(f"{name}.bias")
        return NormSpec(name, *vectors, self.stack.norm_eps, "layer_norm")
