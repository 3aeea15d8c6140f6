"""The pictures of golden cases: values that are the same everywhere, and their pixels in fp64.

Resize and normalization are its own, so that a proof does not repeat the mistakes of ``ingot/image``.
Source: Pillow's documentation for the bicubic kernel, whose support grows where a picture shrinks; CLIP's
preprocessing for mean and standard deviation.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of red, green and blue
_STD = (0.26862954, 0.26130258, 0.27577711)
_SWELLS = (7.0, 19.0, 53.0)  # periods in pixels, one for each channel


def golden_values(name: str, size: tuple[int, int]) -> np.ndarray:
    """A picture of noise over gradients that differ by channel, uint8 [height, width, 3]; turned, mirrored or
    with other channels it is another one.
    """
    height, width = size
    data = hashlib.shake_256(f"picture/{name}".encode()).digest(3 * height * width)
    noise = np.frombuffer(data, dtype=np.uint8).reshape(height, width, 3).astype(np.int64)
    down, across = np.arange(height)[:, None], np.arange(width)[None]
    planes = []
    for channel, period in enumerate(_SWELLS):
        slope = (down * (channel + 1) * 96) // height + (across * (3 - channel) * 48) // width
        wave = ((down + 2 * across) % int(period)) * 64 // int(period)
        planes.append((slope + wave + noise[..., channel] // 4) % 256)
    return np.stack(planes, axis=-1).astype(np.uint8)


def exact_pixels(
    values: np.ndarray, side: int, dtype: torch.dtype = torch.float64, nudge: int = 0
) -> torch.Tensor:
    """uint8 [height, width, 3] → normalized pixels [3, side, side].

    Every ``nudge``-th value is one level higher, which is what a resize may round otherwise.
    """
    planes = torch.from_numpy(values.copy()).permute(2, 0, 1).double()
    for axis in (2, 1):  # across, then down; between them values are whole levels
        if planes.shape[axis] != side:
            weights = _weights(planes.shape[axis], side)
            planes = torch.tensordot(planes, weights, dims=([axis], [1])).movedim(-1, axis)
            planes = (planes + 0.5).floor().clamp(0, 255)
    if nudge:
        planes = planes.clone(memory_format=torch.contiguous_format)
        planes.view(-1)[::nudge] += 1
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1).to(dtype) for each in (_MEAN, _STD))
    return (planes.to(dtype) / 255 - mean) / std


def _weights(count: int, side: int) -> torch.Tensor:
    """Pillow's bicubic weights (a = -1/2) of ``count`` places for each of ``side``, [side, count]."""
    scale = count / side
    wide = max(scale, 1.0)
    rows = torch.zeros(side, count, dtype=torch.float64)
    for place in range(side):
        middle = (place + 0.5) * scale
        first, last = int(max(middle - 2 * wide + 0.5, 0)), int(min(middle + 2 * wide + 0.5, count))
        at = ((torch.arange(first, last, dtype=torch.float64) - middle + 0.5) / wide).abs()
        near, far = (1.5 * at - 2.5) * at * at + 1, ((-0.5 * at + 2.5) * at - 4) * at + 2
        weights = torch.where(at < 1, near, torch.where(at < 2, far, torch.zeros_like(at)))
        rows[place, first:last] = weights / weights.sum()
    return rows
