"""The activations of a plain MLP: GELU (exact or by tanh) and ReLU.

y = bent(acc, "gelu")                    # in a kernel
y = plain_activation(up, "gelu")
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ingot.kernels.activation.gated_mlp import activated

Plain = Literal["gelu", "gelu_tanh", "relu"]


@triton.jit
def bent(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """relu(x), or GELU in fp32: exactly x · Φ(x), or by tanh."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return activated(x, True)


def plain_activation(x: torch.Tensor, activation: Plain) -> torch.Tensor:
    """The PyTorch reference of :func:`bent`."""
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
