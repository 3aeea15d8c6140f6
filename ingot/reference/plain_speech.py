"""The reference encoder of speech: log-mel frames to outputs, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
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
    """Two convolutions with GELU, the second over every other frame; positions; pre-norm layers; a norm."""

    stack: StackConfig
    name: str = "encoder"

    @property
    def around(self) -> tuple[str, ...]:
        """As of ``PlainEncoder``."""
        return f"{self.name}.conv1", f"{self.name}.conv2", f"{self.name}.norm"

    @property
    def first(self) -> tuple[str, str]:
        """As of ``PlainEncoder``."""
        return f"{self.name}.layers.0", f"{self.name}.embed_positions"

    def shape_of(self, layer: str) -> LayerShape:
        """All are alike."""
        return LayerShape(self.stack)

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """[mels, frames] → [positions, hidden_size]: the front, each layer, the norm."""
        names = [f"{self.name}.layers.{index}" for index in range(self.stack.num_layers)]
        layers = [Stage(name, "layer", self._layer(name, read, hooks)) for name in names]
        front = Stage(f"{self.name}.embed_positions", "front", partial(self._front, read, hooks))
        return [front, *layers, Stage(f"{self.name}.norm", "norm", partial(self._last, read, hooks))]

    def _layer(
        self, name: str, read: ReadVector, hooks: Hooks
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda hidden, kept: pre_norm_layer(self.stack, name, read, hooks, hidden)

    def _front(
        self, read: ReadVector, hooks: Hooks, features: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        hidden = features.T
        for name, stride in (("conv1", 1), ("conv2", 2)):
            hidden = self._conv(name, hidden, stride, read, hooks)
        places = read(f"{self.name}.embed_positions.weight")[: len(hidden)]
        hidden = hooks.recorded("stream", hooks.round(hidden + places))
        hooks.see(f"{self.name}.embed_positions", hidden)
        return hidden

    def _last(self, read: ReadVector, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        name = f"{self.name}.norm"
        hidden = hooks.recorded(name, hooks.norm(stack_norm(self.stack, name, read), hidden))
        hooks.see(name, hidden)
        return hidden

    def _conv(self, name: str, x: torch.Tensor, stride: int, read: ReadVector, hooks: Hooks) -> torch.Tensor:
        """Frames [T, C] → [ceil(T / stride), hidden_size]: each sees one frame before and one behind it."""
        path = f"{self.name}.{name}"
        around = F.pad(x, (0, 0, 1, 1)).unfold(0, _TAPS, stride)  # [T / stride, C, taps]
        y = hooks.round(around.flatten(1) @ read(f"{path}.weight").flatten(1).T + read(f"{path}.bias"))
        y = hooks.recorded(path, y)
        hooks.see(path, y)
        return hooks.round(hooks.bend(y, "gelu"))
