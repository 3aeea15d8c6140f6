"""Weights in fp16, as the pocket models ship them. Independent of any layout."""

from __future__ import annotations

import torch


def half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in fp16.

    Raises:
        OverflowError: a value does not fit fp16.
    """
    found = {name: tensor.to(torch.float16).contiguous() for name, tensor in sorted(weights.items())}
    broken = [name for name, tensor in found.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise OverflowError(f"does not fit fp16: {', '.join(broken)}")
    return found
