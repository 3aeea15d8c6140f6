"""Recordings in the containers that phones, browsers and recorders write, made by PyAV in memory.

media(noise, "mp4", "aac", 48000)                    # bytes of a file; also "webm", "adts", "flac" …
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import av
import numpy as np
import torch


class _Pipe(io.RawIOBase):
    """Where nothing can be written again: no length gets into a header."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def media(
    samples: np.ndarray,
    container: str,
    codec: str,
    rate: int = 16000,
    *,
    video: bool = False,
    piped: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """A file with samples [N] or [N, channels] of -1 to 1; ``video``: beside ten seconds of pictures."""
    samples = samples.reshape(len(samples), -1)
    target: Any = _Pipe() if piped else io.BytesIO()
    with av.open(target, "w", format=container, options=dict(options or {})) as file:
        pictures: Any = file.add_stream("mpeg4", rate=10) if video else None
        if video:
            pictures.width = pictures.height = 32
            pictures.pix_fmt = "yuv420p"
        layout = {1: "mono", 2: "stereo"}[samples.shape[1]]
        sound: Any = file.add_stream(codec, rate=rate, layout=layout)
        for _ in range(100 if video else 0):
            file.mux(pictures.encode(av.VideoFrame(32, 32, "yuv420p")))
        for start in range(0, len(samples), rate):
            part = np.ascontiguousarray(samples[start : start + rate].astype(np.float32).reshape(1, -1))
            frame = av.AudioFrame.from_ndarray(part, format="flt", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))
        if video:
            file.mux(pictures.encode(None))
    return bytes(target.data) if piped else bytes(target.getvalue())


def swelling_noise(count: int, seed: int, speed: float) -> np.ndarray:
    """Noise [count] at 16 kHz, whose loudness swells; ``speed`` in radians per second."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    swell = (torch.arange(count) / 16000 * speed).sin() ** 2
    return (0.2 * noise * swell).numpy()


def silent_film(container: str = "mp4") -> bytes:
    """A video without sound."""
    target = io.BytesIO()
    with av.open(target, "w", format=container) as file:
        pictures: Any = file.add_stream("mpeg4", rate=1)
        pictures.width = pictures.height = 32
        pictures.pix_fmt = "yuv420p"
        file.mux(pictures.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(pictures.encode(None))
    return target.getvalue()


def wav(
    data: bytes, rate: int = 16000, channels: int = 1, *, size: int | None = None, riff: int | None = None
) -> bytes:
    """PCM of 16 bits; ``size``, ``riff``: what the header says of its samples and of the file."""
    size = len(data) if size is None else size
    block = 2 * channels & 0xFFFF
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block & 0xFFFFFFFF, block, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body
