"""e4m3 by its definition (1 sign, 4 exponent, 3 fraction bits), in NumPy and integers: a judge of kernels
and schemes.

    decoded(bits)        # uint8 → float64
    encoded(values)      # float64 → uint8, the nearest, ties to even, at most 448
"""

from __future__ import annotations

import numpy as np
import torch

NAN = 0x7F


def _value(bits: int) -> float:
    sign, power, fraction = (-1.0) ** (bits >> 7), bits >> 3 & 15, bits & 7
    if bits & NAN == NAN:
        return float("nan")
    return sign * (fraction * 2.0**-9 if power == 0 else (8 + fraction) * 2.0 ** (power - 10))


TABLE = np.array([_value(bits) for bits in range(256)])
_POSITIVE = TABLE[:NAN]


def decoded(bits: np.ndarray) -> np.ndarray:
    """What bytes mean."""
    found: np.ndarray = TABLE[bits]
    return found


def encoded(values: np.ndarray) -> np.ndarray:
    """The bytes of the nearest values: of two that are as near, the one with an even last bit."""
    size = np.minimum(np.abs(values), 448.0)
    above = np.clip(np.searchsorted(_POSITIVE, size), 1, NAN - 1)
    low, high = _POSITIVE[above - 1], _POSITIVE[above]
    down, up = size - low, high - size
    even = np.where((above - 1) % 2 == 0, above - 1, above)
    bits = np.where(down < up, above - 1, np.where(up < down, above, even))
    return np.where(np.signbit(values), bits | 0x80, bits).astype(np.uint8)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor of e4m3."""
    assert tensor.dtype == torch.float8_e4m3fn
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of e4m3 means, fp64, without PyTorch's conversion."""
    return torch.from_numpy(decoded(bits_of(tensor)))
