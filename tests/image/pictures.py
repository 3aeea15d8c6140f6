"""Pictures that tests draw, and what independent arithmetic makes of them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

SIDE = 16
MODEL = np.random.default_rng(7).integers(0, 256, (SIDE, SIDE, 3), np.uint8)  # nothing in it is symmetric


def file_of(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """A file of a format, as Pillow writes it."""
    found = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(found, kind, **options)
    return found.getvalue()


def png(width: int, height: int, depth: int, color: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG by its specification, for what Pillow does not write. ``rows``: each begins with its filter."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = (b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def over_white(values: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """float64 [height, width, 3]; ``alpha``: 0 to 255, [height, width]."""
    share = alpha[..., None].astype(np.float64) / 255
    return values * share + 255 * (1 - share)


def bicubic(values: np.ndarray, side: int) -> np.ndarray:
    """Antialiased bicubic interpolation (Keys, a = -1/2) in float64: [height, width, n] to [side, side, n].
    As in 8 bits, overshoot is cut after each of the passes.
    """
    wide = np.einsum("xw,hwn->hxn", _weights(values.shape[1], side), values.astype(np.float64)).clip(0, 255)
    return np.einsum("yh,hxn->yxn", _weights(values.shape[0], side), wide).clip(0, 255)


def _weights(size: int, side: int) -> np.ndarray:
    scale = size / side
    centres = (np.arange(side) + 0.5) * scale
    distance = np.abs(np.arange(size) + 0.5 - centres[:, None]) / max(scale, 1.0)
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0))
    return weights / weights.sum(1, keepdims=True)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
