"""Batch invariance of a model that is already built.

Owns the switch of its linear layers and attentions to arithmetic in which a token's bits depend on its own
request alone: not on what runs beside it, nor on the step that computes it. Norms, rotary embedding and
activations compute every row by itself anyway. docs/numerics.md says what that guarantees and costs. Knows no
kernel's inside.

    make_batch_invariant(model)
"""

from __future__ import annotations

from torch import nn

from ingot.config.kernel_plan import TileTable
from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.linear import Linear
from ingot.layers.norm import LayerNorm, RMSNorm


def make_batch_invariant(model: nn.Module) -> None:
    """Switch a model over, in place; its weights stay as they are.

    Tiles of a plan hold for some numbers of rows and would order a row's sums by them: the defaults, which do
    not depend on the rows, take their place.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.scheme = module.scheme.batch_invariant()
        elif isinstance(module, Attention):
            module.batch_invariant = True
            module.place_tiles = TileTable({})
        elif isinstance(module, CrossAttention):
            module.batch_invariant = True
        elif isinstance(module, (RMSNorm, LayerNorm)):
            module.tiles = TileTable({})
