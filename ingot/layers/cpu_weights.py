"""How a CPU holds the weights of a loaded model: packed once for its products, or in the dtype of arithmetic.

settle_weights(model, packs=True)
"""

from __future__ import annotations

import logging

import torch

from ingot.config.half_dtypes import in_encoder
from ingot.device import dtype_name
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear, linears

_log = logging.getLogger(__name__)


def settle_weights(model: Decoder, *, packs: bool) -> None:
    """Pack the linear layers one after another, so that at most one is held twice. Without ``packs``, or
    where a layer cannot be packed, a dense weight is widened to the dtype of arithmetic.
    """
    refused = []
    for name, linear in linears(model).items():
        dtype = model.encoder_dtype if in_encoder(name) else model.dtype
        if not settle_linear(linear, dtype, packs=packs):
            refused.append(name)
    if refused:
        _log.warning(
            "%d layers have values that fp16 cannot hold (%s is the first): they are in %s, and slower",
            len(refused),
            refused[0],
            dtype_name(model.dtype),
        )


def settle_linear(linear: Linear, dtype: torch.dtype, *, packs: bool) -> bool:
    """The same of one layer beside activations in ``dtype``; False: its values do not allow to pack it."""
    wanted = packs and linear.packable(dtype)
    if wanted and linear.pack():
        return True
    linear.widen_weight(dtype)
    return not wanted
