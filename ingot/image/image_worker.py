"""Decodes untrusted pictures in a process of its own (``LimitedProcess``)."""

from __future__ import annotations

import json
import struct

import numpy as np

from ingot.errors import RequestError
from ingot.image.image_decoder import MOST_PIXELS, Decoded, decode
from ingot.sandbox.limited_process import ProcessLimits
from ingot.sandbox.limited_worker import failure, raise_failure

MOST_BYTES = 128 << 20  # of a file
_SIDE = struct.Struct("<I")
_VALUES = b"rgb8"
_LIBRARIES = 1 << 30  # bytes of address space; BLAS takes more on machines with many cores
_PIXEL_BYTES = 24  # at most, for a WebP with alpha: two canvases, the frame, and its copies
_FILE_COPIES = 4
LIMITS = ProcessLimits(
    seconds=20.0, memory=_LIBRARIES + _PIXEL_BYTES * MOST_PIXELS + _FILE_COPIES * MOST_BYTES, nice=10
)


def question(data: bytes | bytearray, side: int) -> bytes:
    """A file's bytes, and the size of the result."""
    return _SIDE.pack(side) + data


def answer_bytes(asked: bytes | bytearray) -> list[bytes | memoryview]:
    """The picture and its notes, or the error."""
    (side,) = _SIDE.unpack_from(asked)
    try:
        values, notes = decode(memoryview(asked)[_SIDE.size :], side)
        return [_VALUES, values.data.cast("B"), json.dumps(notes).encode()]
    except RequestError as error:
        return failure(error)


def decoded(answer: bytearray, side: int) -> Decoded:
    """The picture and notes of an answer; raises as ``decode``."""
    raise_failure(answer)
    start, end = len(_VALUES), len(_VALUES) + side * side * 3
    values = np.frombuffer(answer, np.uint8, offset=start, count=end - start).reshape(side, side, 3)
    return values, tuple(json.loads(answer[end:]))
