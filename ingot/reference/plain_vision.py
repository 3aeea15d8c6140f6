"""The reference encoder of pictures: pixels to rows of a prompt, in plain PyTorch.

Source: EVA (arXiv:2211.07636), BLIP-2 (arXiv:2301.12597), MiniGPT-4 (arXiv:2304.10592).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ingot.config.encoder_config import StackConfig
from ingot.reference.plain_layer import Hooks, NormSpec, PlainCross, ReadVector
from ingot.reference.plain_stage import (
    LayerShape,
    Stage,
    pre_norm_layer,
    stack_attention,
    stack_mlp,
    stack_norm,
)

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_VIT, _LN, _QFORMER, _PROJECTOR = (f"encoder.{name}" for name in ("vit", "ln_vision", "qformer", "projector"))


@dataclass(frozen=True)
class PlainQFormer:
    """Learned queries; post-norm layers, of which 0, n, 2n … also read the picture."""

    stack: StackConfig
    cross_every: int

    def crosses(self, layer: str) -> bool:
        return int(layer.split(".")[3]) % self.cross_every == 0


@dataclass(frozen=True)
class PlainVisionEncoder:
    """A ViT with a class token and no norm after it, a norm, a Q-Former or joined patches, a projection.

    Attributes:
        ln_eps: of the norm between ViT and Q-Former.
        joined: neighbouring patches that become one position where there is no Q-Former; the class token is
            left out then.
    """

    vit: StackConfig
    patch_size: int
    ln_eps: float
    joined: int
    qformer: PlainQFormer | None = None

    @property
    def around(self) -> tuple[str, ...]:
        layers = range(0 if self.qformer is None else self.qformer.stack.num_layers)
        norms = [f"{_QFORMER}.norm", *(f"{_QFORMER}.layers.{i}.mlp_norm" for i in layers)] if layers else []
        return f"{_VIT}.patch_embedding", _LN, *norms, _PROJECTOR

    @property
    def first(self) -> tuple[str, str]:
        return f"{_VIT}.layers.0", f"{_VIT}.embed_positions"

    def shape_of(self, layer: str) -> LayerShape | None:
        if layer.startswith(f"{_VIT}."):
            return LayerShape(self.vit)
        if self.qformer is None or not layer.startswith(f"{_QFORMER}."):
            return None
        reads = self.vit.hidden_size if self.qformer.crosses(layer) else 0
        return LayerShape(self.qformer.stack, post_norm=True, reads=reads)

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """[3, side, side] → [positions, hidden_size of the LLM]."""
        front = Stage(f"{_VIT}.embed_positions", "front", partial(self._front, read, hooks))
        layers = [self._layer(f"{_VIT}.layers.{i}", read, hooks) for i in range(self.vit.num_layers)]
        norm = Stage(_LN, "norm", partial(self._norm, read, hooks), keeps=True)
        bridge = Stage(_PROJECTOR, "bridge", partial(self._projector, hooks))
        return [front, *layers, norm, *self._queries(read, hooks), bridge]

    def _queries(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        own = self.qformer
        if own is None:
            return []
        names = [f"{_QFORMER}.layers.{i}" for i in range(own.stack.num_layers)]
        layers = [Stage(name, "layer", partial(_post_norm_layer, own, name, read, hooks)) for name in names]
        return [Stage(f"{_QFORMER}.norm", "front", partial(_first_queries, own, read, hooks)), *layers]

    def _layer(self, name: str, read: ReadVector, hooks: Hooks) -> Stage:
        run: Run = lambda hidden, kept: pre_norm_layer(self.vit, name, read, hooks, hidden)  # noqa: E731
        return Stage(name, "layer", run)

    def _front(
        self, read: ReadVector, hooks: Hooks, pixels: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Each patch times the weight, row by row from the top left; the class token stands before them."""
        path, size = f"{_VIT}.patch_embedding", self.patch_size
        channels, height, width = pixels.shape
        cut = pixels.reshape(channels, height // size, size, width // size, size)
        rows = cut.permute(1, 3, 0, 2, 4).reshape(-1, channels * size * size)
        y = hooks.round(rows @ read(f"{path}.weight").flatten(1).T + read(f"{path}.bias"))
        hidden = torch.cat([read(f"{_VIT}.class_embedding").view(1, -1), hooks.made(path, y)])
        hidden = hooks.recorded("stream", hooks.round(hidden + read(f"{_VIT}.embed_positions.weight")))
        hooks.see(f"{_VIT}.embed_positions", hidden)
        return hidden

    def _norm(self, read: ReadVector, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        spec = NormSpec(_LN, read(f"{_LN}.weight"), read(f"{_LN}.bias"), self.ln_eps, "layer_norm")
        return hooks.made(_LN, hooks.norm(spec, hidden))

    def _projector(self, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Of queries; without them of patches, some joined side by side."""
        if self.qformer is None:
            hidden = hidden[1:].reshape(-1, self.joined * hidden.shape[1])
        taken = hooks.recorded(f"{_PROJECTOR}/in", hidden)
        return hooks.made(_PROJECTOR, hooks.product(_PROJECTOR, taken))


def _first_queries(
    own: PlainQFormer, read: ReadVector, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """The learned queries, normed; the picture comes in by cross-attention."""
    name = f"{_QFORMER}.norm"
    return hooks.made(name, hooks.norm(stack_norm(own.stack, name, read), read(f"{_QFORMER}.queries")))


def _post_norm_layer(
    own: PlainQFormer, name: str, read: ReadVector, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """norm(x + attention(x)), in some layers the same with cross-attention, norm(x + mlp(x))."""

    def joined(x: torch.Tensor, branch: torch.Tensor, norm: str) -> torch.Tensor:
        total = hooks.recorded("stream", hooks.round(x + branch), branch)
        return hooks.norm(stack_norm(own.stack, f"{name}.{norm}", read), total)

    attention = stack_attention(own.stack, f"{name}.self_attn", hidden)
    x = joined(hidden, attention.run(hidden, hooks), "self_attn_norm")
    if own.crosses(name):
        x = hooks.recorded("cross_in", x)
        x = joined(x, _crossed(own, f"{name}.encoder_attn", x, kept, hooks), "encoder_attn_norm")
    x = hooks.recorded("mlp_in", x)
    x = joined(x, stack_mlp(own.stack, f"{name}.mlp").of(x, hooks), "mlp_norm")
    x = hooks.recorded(f"{name}.mlp_norm", x)
    hooks.see(name, x)
    return x


def _crossed(own: PlainQFormer, name: str, x: torch.Tensor, kept: torch.Tensor, hooks: Hooks) -> torch.Tensor:
    """Queries [Q, hidden_size] over the picture's positions [P, width]; keys first, then values."""
    size, made = own.stack.hidden_size // own.stack.num_heads, f"{name}.kv_proj"
    heads = own.stack.num_heads, size
    query = hooks.recorded("cross_query", hooks.product(f"{name}.q_proj", x).unflatten(-1, heads))
    both = hooks.made(made, hooks.product(made, hooks.recorded(f"{made}/in", kept)))
    keys, values = (part.unflatten(-1, heads) for part in both.chunk(2, dim=-1))
    cross = PlainCross(name=name, head_dim=size, scale=size**-0.5)
    attended = hooks.round(cross.attend(query, keys, values).flatten(1))
    output = hooks.product(f"{name}.o_proj", hooks.recorded("cross_attended", attended))
    hooks.see(name, output)
    return hooks.branch(name, output)
