"""An encoder's mathematics as named stages in plain PyTorch; shares nothing with the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ingot.config.encoder_config import StackConfig
from ingot.reference.plain_layer import Hooks, NormSpec, PlainAttention, PlainLayer, PlainMlp, ReadVector


@dataclass(frozen=True)
class Passage:
    """One input's hidden states, and a stage's output kept for cross-attention (before that [0])."""

    hidden: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor) -> Passage:
        return cls(features, features.new_empty(0))

    def after(self, stage: Stage) -> Passage:
        hidden = stage.run(self.hidden, self.kept)
        return Passage(hidden, hidden if stage.keeps else self.kept)

    def to(self, device: torch.device) -> Passage:
        return Passage(self.hidden.to(device), self.kept.to(device))


@dataclass(frozen=True)
class Stage:
    """One step of an encoder.

    Attributes:
        name: of the module that does it.
        kind: ``front`` makes hidden states of an input, ``layer`` and ``bridge`` have linear layers, which
            can be quantized; ``norm`` has none.
        run: (hidden states, what was kept) → hidden states.
        keeps: later stages read its output by cross-attention.
    """

    name: str
    kind: Literal["front", "layer", "norm", "bridge"]
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keeps: bool = False

    @property
    def calibrates(self) -> bool:
        return self.kind in ("layer", "bridge")


@dataclass(frozen=True)
class LayerShape:
    """The shape of an encoder's layer.

    Attributes:
        post_norm: norms come after the sums, so branches are added to their outputs.
        reads: width of the kept states that cross-attention reads; 0: it has none.
    """

    stack: StackConfig
    post_norm: bool = False
    reads: int = 0

    @property
    def crosses(self) -> bool:
        return self.reads > 0


class PlainEncoder(Protocol):
    """An encoder that its architecture declares.

    Attributes:
        around: modules outside the layers, by their names in the model.
        first: the first layer, and the module whose output it takes.
    """

    @property
    def around(self) -> tuple[str, ...]: ...

    @property
    def first(self) -> tuple[str, str]: ...

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """The stages in order; ``read`` gives weights that no product has, when needed."""
        ...

    def shape_of(self, layer: str) -> LayerShape | None:
        """Of the layer that a name is in; None for a bridge."""
        ...


def stack_attention(stack: StackConfig, name: str, hidden: torch.Tensor) -> PlainAttention:
    """Every position attends to all of its input [T, hidden_size]."""
    size = stack.hidden_size // stack.num_heads
    return PlainAttention(
        name=name,
        query_norm=None,
        key_norm=None,
        heads=stack.num_heads,
        kv_heads=stack.num_heads,
        head_dim=size,
        positions=torch.arange(len(hidden), device=hidden.device),
        scale=size**-0.5,
        causal=False,
    )


def stack_norm(stack: StackConfig, name: str, read: ReadVector) -> NormSpec:
    return NormSpec(name, read(f"{name}.weight"), read(f"{name}.bias"), stack.norm_eps, "layer_norm")


def stack_mlp(stack: StackConfig, name: str) -> PlainMlp:
    return PlainMlp(name=name, activation=stack.activation, on=None)


def pre_norm_layer(
    stack: StackConfig, name: str, read: ReadVector, hooks: Hooks, hidden: torch.Tensor
) -> torch.Tensor:
    """[T, hidden_size] → the same."""
    layer = PlainLayer(
        name=name,
        input_norm=stack_norm(stack, f"{name}.input_layernorm", read),
        attention=stack_attention(stack, f"{name}.self_attn", hidden),
        post_norm=stack_norm(stack, f"{name}.post_attention_layernorm", read),
        mlp=stack_mlp(stack, f"{name}.mlp"),
    )
    return layer.run(hidden, hooks)
