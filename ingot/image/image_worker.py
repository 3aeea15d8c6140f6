"""Pictures to RGB, in a process of their own.

Covers what the process is asked and what it answers. A picture is a stranger's file, which libraries in C
decode, and may be much larger than it looks. Independent of torch.

    with LimitedProcess("ingot.image.image_worker", LIMITS) as process:
        values, notes = decoded(process.ask_bytes(question(data, side=224)), side=224)
"""

from __future__ import annotations

import json
import struct

import numpy as np

from ingot.errors import RequestError, shown
from ingot.image.image_decoder import MOST_PIXELS, Decoded, decode
from ingot.sandbox.limited_process import ProcessLimits

MOST_BYTES = 128 << 20  # of a file
_SIDE = struct.Struct("<I")
_VALUES, _ERROR = b"rgb8", b"fail"
_LIBRARIES = 1 << 30  # bytes of address space, of which BLAS takes more on machines with many cores
_PIXEL_BYTES = 24  # at once, for a WebP with alpha: two canvases, the frame, and its copies
_FILE_COPIES = 4
LIMITS = ProcessLimits(
    seconds=20.0,
    memory=_LIBRARIES + _PIXEL_BYTES * MOST_PIXELS + _FILE_COPIES * MOST_BYTES,
    nice=10,
)


def question(data: bytes | bytearray, side: int) -> bytes:
    """A file's bytes, and the size that its picture is to have."""
    return _SIDE.pack(side) + data


def answer_bytes(asked: bytes | bytearray) -> list[bytes | memoryview]:
    """The picture and its notes, or the parts of the error."""
    (side,) = _SIDE.unpack_from(asked)
    try:
        values, notes = decode(memoryview(asked)[_SIDE.size :], side)
        return [_VALUES, values.data.cast("B"), json.dumps(notes).encode()]
    except RequestError as error:
        seen, allowed = (None if value is None else shown(value) for value in (error.seen, error.allowed))
        parts = {"what": error.what, "seen": seen, "allowed": allowed, "fix": error.fix}
        return [_ERROR, json.dumps(parts).encode()]


def decoded(answer: bytearray, side: int) -> Decoded:
    """The picture and notes of an answer.

    Raises:
        RequestError: as ``decode``.
    """
    if answer[: len(_ERROR)] == _ERROR:
        parts = json.loads(answer[len(_ERROR) :])
        raise RequestError(parts.pop("what"), **parts)
    start, end = len(_VALUES), len(_VALUES) + side * side * 3
    values = np.frombuffer(answer, np.uint8, offset=start, count=end - start).reshape(side, side, 3)
    return values, tuple(json.loads(answer[end:]))
