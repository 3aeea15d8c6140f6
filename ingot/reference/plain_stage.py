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
    """One input on its way: hidden states, and what a stage kept for cross-attention behind it (before that,
    nothing: [0]).
    """

    hidden: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor) -> Passage:
        """Before the first stage."""
        return cls(features, features.new_empty(0))

    def after(self, stage: Stage) -> Passage:
        """Behind a stage."""
        hidden = stage.run(self.hidden, self.kept)
        return Passage(hidden, hidden if stage.keeps else self.kept)

    def to(self, device: torch.device) -> Passage:
        """The same on a device."""
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
        """Whether it has linear layers."""
        return self.kind in ("layer", "bridge")


@dataclass(frozen=True)
class LayerShape:
    """What a layer of an encoder is like.

    Attributes:
        post_norm: norms stand behind the sums, so that what they give is also what branches are added to.
        reads: width of what a stage kept, which it reads by cross-attention; 0: it reads nothing.
    """

    stack: StackConfig
    post_norm: bool = False
    reads: int = 0

    @property
    def crosses(self) -> bool:
        """Whether it has cross-attention."""
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
        """What to compute one after another; ``read`` gives weights that no product has, when they are
        needed.
        """
        ...

    def shape_of(self, layer: str) -> LayerShape | None:
        """Of the layer that a name is in; None of a bridge."""
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
    """A LayerNorm of a stack."""
    return NormSpec(name, read(f"{name}.weight"), read(f"{name}.bias"), stack.norm_eps, "layer_norm")


def stack_mlp(stack: StackConfig, name: str) -> PlainMlp:
    """The MLP of a stack's layer."""
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
