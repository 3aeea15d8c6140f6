"""What a layer needs to know to be built.

Owns the bundle of choices that come from the engine and not from the model: linear scheme, kernel plan,
dtype. Knows no layer.

    ctx = BuildContext(scheme=make_scheme(quant), plan=KernelPlan(), dtype=torch.float16)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.config.plan import KernelPlan
from ingot.quant.schemes import LinearScheme


@dataclass(frozen=True)
class BuildContext:
    """Passed down the module tree while it is built; ``dtype`` is the dtype of weights and activations."""

    scheme: LinearScheme
    plan: KernelPlan
    dtype: torch.dtype


def empty_weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """An uninitialised, frozen weight of this shape on the current default device."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
