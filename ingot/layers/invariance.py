"""Batch invariance: a token's bits depend on its own request alone, by the arithmetic of a built model.

Norms, rotary embedding and activations compute every row by itself anyway. docs/numerics.md says what is
guaranteed and what it costs.

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
    """Switch a model in place; its weights stay as they are. A plan's tiles, which depend on the number of
    rows and change the order of a row's sums, are replaced by the defaults, which do not.
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
