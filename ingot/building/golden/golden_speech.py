"""The speech of golden cases: samples that are the same everywhere, and their log-mel features in fp64.

Features are a plain Fourier sum, so that a proof does not repeat the mistakes of ``audio/log_mel.py``.
Source: Slaney's Auditory Toolbox for the mel scale, OpenAI's Whisper for the rest.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

HOP = 160  # samples per frame
_RATE, _SPAN = 16_000, 400
_SWELLS = (7919, 1543)  # samples in which loudness goes down and up, so that frames differ


def golden_samples(name: str, count: int) -> torch.Tensor:
    """Noise of changing loudness, float32 [count] in -1 to 1, of the bits of SHAKE-256(name)."""
    data = hashlib.shake_256(f"speech/{name}".encode()).digest(2 * count)
    noise = np.frombuffer(data, dtype="<i2").astype(np.float64) / 32768
    at = np.arange(count)
    for period in _SWELLS:
        noise *= np.abs(at % period / period - 0.5) + 0.02
    noise[1:] += noise[:-1]  # lower frequencies are louder, as in speech
    return torch.from_numpy(noise).float()


def exact_log_mel(samples: torch.Tensor, mels: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[N] at 16 kHz → log-mel features [mels, N // 160], with all sums in ``dtype``."""
    wide = samples.to(dtype)
    half = _SPAN // 2
    mirrored = torch.cat([wide[1 : half + 1].flip(0), wide, wide[-half - 1 : -1].flip(0)])
    frames = mirrored.unfold(0, _SPAN, HOP)[: len(samples) // HOP]  # [T, span]
    at = torch.arange(_SPAN, dtype=torch.float64)
    window = (0.5 - 0.5 * torch.cos(2 * math.pi * at / _SPAN)).to(dtype)
    turns = 2 * math.pi * torch.outer(at, torch.arange(half + 1)).remainder(_SPAN) / _SPAN
    real, imaginary = ((frames * window) @ part(turns).to(dtype) for part in (torch.cos, torch.sin))
    power = real.square() + imaginary.square()  # [T, bins]
    logs = (power @ _triangles(mels).to(dtype).T).clamp(min=1e-10).log10()
    return ((logs.clamp(min=float(logs.max()) - 8) + 4) / 4).T.contiguous()


def _triangles(mels: int) -> torch.Tensor:
    """Weights [mels, bins] of triangles over the frequencies, each of the same area."""
    top = 15 + 27 * math.log(_RATE / 2 / 1000) / math.log(6.4)  # of the mel scale, linear below 1000 Hz
    places = [top * i / (mels + 1) for i in range(mels + 2)]
    corners = [mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27) for mel in places]
    bins = [_RATE / _SPAN * i for i in range(_SPAN // 2 + 1)]
    rows = []
    for low, middle, high in zip(corners, corners[1:], corners[2:], strict=False):
        up = [(hz - low) / (middle - low) for hz in bins]
        down = [(high - hz) / (high - middle) for hz in bins]
        pairs = zip(up, down, strict=True)
        rows.append([max(0.0, min(pair)) * 2 / (high - low) for pair in pairs])
    return torch.tensor(rows, dtype=torch.float64)
