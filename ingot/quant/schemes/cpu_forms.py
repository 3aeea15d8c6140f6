"""Which form of a weight a CPU multiplies by, and what that form holds.

form = cpu_form(scheme, tensors, in_features, torch.float32)        # None: the stored one
"""

from __future__ import annotations

import torch

from ingot.quant.schemes.expanded_int8 import ExpandedInt8
from ingot.quant.schemes.half_packed import HalfPacked, half_packed, half_packed_bytes, packs_halves
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.linear_scheme import LinearScheme, Tensors
from ingot.quant.schemes.weight_only import WeightOnly

PACKED = ("weight", "words", "pairs")  # the tensors of which a form takes the place
CpuForm = HalfPacked | ExpandedInt8


def has_cpu_form(scheme: LinearScheme, stored: torch.dtype, compute: torch.dtype) -> bool:
    """Whether a layer with a weight that is ``stored`` so is packed for activations in ``compute``."""
    if isinstance(scheme, Int4InInt8):
        return True
    dense = scheme.dense and stored.itemsize == 2
    return compute == torch.float32 and packs_halves() and (dense or isinstance(scheme, WeightOnly))


def cpu_form(
    scheme: LinearScheme, tensors: Tensors, in_features: int
) -> tuple[CpuForm, dict[str, torch.Tensor]] | None:
    """The form of a scheme that has one, and its tensors; None where fp16 cannot hold the values."""
    if isinstance(scheme, Int4InInt8):
        return ExpandedInt8.of(scheme, tensors, in_features)
    return half_packed(scheme, tensors, in_features)


def cpu_form_bytes(scheme: LinearScheme, out_features: int, in_features: int) -> int:
    """Bytes of what takes the place of a ``PACKED`` tensor, at most."""
    if isinstance(scheme, Int4InInt8):
        return out_features * in_features
    return half_packed_bytes(scheme, out_features, in_features)
