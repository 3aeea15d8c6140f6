"""Which form of a weight a CPU multiplies by, and what that form holds.

form = cpu_form(scheme, tensors, in_features, torch.float32)        # None: the stored one
"""

from __future__ import annotations

import torch

from ingot.quant.schemes.expanded_int8 import ExpandedInt8
from ingot.quant.schemes.half_packed import HalfPacked, half_packed, half_packed_bytes, packs_halves
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels, in_panels, in_panels_bytes, packing_of
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.linear_scheme import LinearScheme, Tensors
from ingot.quant.schemes.weight_only import WeightOnly

PACKED = ("weight", "words", "pairs")  # the tensors of which a form takes the place
CpuForm = InPanels | Int8InPanels | HalfPacked | ExpandedInt8


def has_cpu_form(scheme: LinearScheme, stored: torch.dtype, compute: torch.dtype, in_features: int) -> bool:
    """Whether a layer with a weight that is ``stored`` so is packed for activations in ``compute``."""
    if isinstance(scheme, Int4InInt8):
        return True
    if isinstance(scheme, Int8Both):
        return packing_of(scheme, stored, in_features) is not None
    dense = scheme.dense and stored.itemsize == 2
    if compute != torch.float32 or not (dense or isinstance(scheme, WeightOnly)):
        return False
    return packs_halves() or packing_of(scheme, stored, in_features) is not None


def cpu_form(
    scheme: LinearScheme, tensors: Tensors, in_features: int
) -> tuple[CpuForm, dict[str, torch.Tensor]] | None:
    """The form of a scheme that has one, and its tensors; None where fp16 cannot hold the values."""
    found = in_panels(scheme, tensors, in_features)
    if found is not None:
        return found
    if isinstance(scheme, Int4InInt8):
        return ExpandedInt8.of(scheme, tensors, in_features)
    return half_packed(scheme, tensors, in_features)


def cpu_form_bytes(scheme: LinearScheme, out_features: int, in_features: int, stored: torch.dtype) -> int:
    """Bytes of what takes the place of a ``PACKED`` tensor, at most; ``stored``: the dtype of a dense one."""
    packing = packing_of(scheme, stored, in_features)
    if packing is not None:
        return in_panels_bytes(scheme, packing, out_features, in_features)
    if isinstance(scheme, Int4InInt8):
        return out_features * in_features
    return half_packed_bytes(scheme, out_features, in_features)
