"""Samples as a WAV file of 32-bit floats, which loses nothing of them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_FLOAT = 3  # WAVE_FORMAT_IEEE_FLOAT
_HEADER = "<4sI4s4sIHHIIHH4sI"


def float_wav(samples: Any, rate: Any) -> bytes:
    """The bytes of a file with ``samples``, [N] or [N, channels] from -1 to 1, at ``rate`` per second.

    Raises ValueError where a sample is not finite, the shape is another, or the rate is no integer above 0.
    """
    found = np.asarray(samples, dtype=np.float32)
    if found.ndim not in (1, 2) or not found.size or not np.isfinite(found).all():
        raise ValueError(f"samples of shape {list(found.shape)}, or not finite")
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)) or not 0 < rate < 1 << 31:
        raise ValueError(f"a sampling_rate of {rate!r}")
    channels, data = 1 if found.ndim == 1 else found.shape[1], found.astype("<f4").tobytes()
    frame = 4 * channels
    fields = (16, _FLOAT, channels, int(rate), int(rate) * frame, frame, 32)
    return struct.pack(_HEADER, b"RIFF", 36 + len(data), b"WAVE", b"fmt ", *fields, b"data", len(data)) + data
