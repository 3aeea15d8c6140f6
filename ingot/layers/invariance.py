"""Batch invariance of a model that is already built.

Owns the switch of its linear layers and attentions to arithmetic in which a token's bits depend on its own
request alone: not on what runs beside it, nor on the step that computes it. Norms, rotary embedding and
activations compute every row by itself anyway. docs/numerics.md says what that guarantees and costs. Knows no
kernel's inside.

    make_batch_invariant(model)
"""

from __future__ import annotations

from torch import nn

from ingot.layers.attention import Attention
from ingot.layers.linear import Linear


def make_batch_invariant(model: nn.Module) -> None:
    """Switch a model over, in place; its weights stay as they are."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.scheme = module.scheme.batch_invariant()
        elif isinstance(module, Attention):
            module.batch_invariant = True
