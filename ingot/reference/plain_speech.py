"""The reference encoder of speech: log-mel frames to outputs, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ingot.config.encoder_config import StackConfig
from ingot.reference.plain_layer import Hooks, ReadVector
from ingot.reference.plain_stage import LayerShape, Stage, pre_norm_layer, stack_norm

_TAPS = 3  # frames that a convolution sees


@dataclass(frozen=True)
class PlainSpeechEncoder:
    """Two convolutions with GELU, the second with stride 2; positions; pre-norm layers; a norm."""

    stack: StackConfig
    name: str = "encoder"

    @property
    def around(self) -> tuple[str, ...]:
        return f"{self.name}.conv1", f"{self.name}.conv2", f"{self.name}.norm"

    @property
    def first(self) -> tuple[str, str]:
        return f"{self.name}.layers.0", f"{self.name}.embed_positions"

    def shape_of(self, layer: str) -> LayerShape:
        return LayerShape(self.stack)

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """[mels, frames] → [positions, hidden_size]: the front, each layer, the norm."""

        def layer(name: str, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            return pre_norm_layer(self.stack, name, read, hooks, hidden)

        names = [f"{self.name}.layers.{index}" for index in range(self.stack.num_layers)]
        layers = [Stage(name, "layer", partial(layer, name)) for name in names]
        front = Stage(f"{self.name}.embed_positions", "front", partial(self._front, read, hooks))
        return [front, *layers, Stage(f"{self.name}.norm", "norm", partial(self._last, read, hooks))]

    def _front(
        self, read: ReadVector, hooks: Hooks, features: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        hidden = features.T
        for name, stride in (("conv1", 1), ("conv2", 2)):
            # A position sees one frame before and one after it: [T, C] → [ceil(T / stride), C, taps].
            around, path = F.pad(hidden, (0, 0, 1, 1)).unfold(0, _TAPS, stride), f"{self.name}.{name}"
            y = hooks.round(around.flatten(1) @ read(f"{path}.weight").flatten(1).T + read(f"{path}.bias"))
            hidden = hooks.round(hooks.bend(hooks.made(path, y), "gelu"))
        places = read(f"{self.name}.embed_positions.weight")[: len(hidden)]
        hidden = hooks.recorded("stream", hooks.round(hidden + places))
        hooks.see(f"{self.name}.embed_positions", hidden)
        return hidden

    def _last(self, read: ReadVector, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        name = f"{self.name}.norm"
        return hooks.made(name, hooks.norm(stack_norm(self.stack, name, read), hidden))
