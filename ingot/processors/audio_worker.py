"""Recordings to samples, in a process of their own.

Owns what the process is asked and what it answers. A recording is a stranger's file, which a library in C
decodes, and may be much larger than it looks. Knows no server.

    with LimitedProcess("ingot.processors.audio_worker", limits(60.0)) as process:
        samples = samples_of(process.ask_bytes(question(data, max_seconds=60.0)))   # float32 [N] at 16 kHz
"""

from __future__ import annotations

import json
import struct

import numpy as np

from ingot.errors import RequestError, shown
from ingot.processors.audio import RATE, read_samples
from ingot.processors.limited_process import ProcessLimits

_SECONDS = struct.Struct("<d")
_SAMPLES, _ERROR = b"s", b"e"
_CPU_SECONDS = 30.0
_AUDIO_PER_CPU_SECOND = 100.0  # that the slowest format and resampling take
_LIBRARIES = 1 << 30  # bytes of address space


def limits(max_seconds: float) -> ProcessLimits:
    """For recordings of at most so many seconds, whose samples are there three times at the end."""
    return ProcessLimits(
        seconds=_CPU_SECONDS + max_seconds / _AUDIO_PER_CPU_SECOND,
        memory=_LIBRARIES + 4 * int(max_seconds * RATE) * 4,
        nice=10,
    )


def question(data: bytes, max_seconds: float) -> bytes:
    """A file's bytes, and how many seconds they may have."""
    return _SECONDS.pack(max_seconds) + data


def answer_bytes(asked: bytes) -> bytes:
    """The samples, or the parts of the error."""
    (max_seconds,) = _SECONDS.unpack_from(asked)
    try:
        return _SAMPLES + read_samples(asked[_SECONDS.size :], max_seconds).astype("<f4").tobytes()
    except RequestError as error:
        seen, allowed = (None if value is None else shown(value) for value in (error.seen, error.allowed))
        parts = {"what": error.what, "seen": seen, "allowed": allowed, "fix": error.fix}
        return _ERROR + json.dumps(parts).encode()


def samples_of(found: bytes) -> np.ndarray:
    """Samples of an answer.

    Raises:
        RequestError: as ``read_samples``.
    """
    if found[:1] == _ERROR:
        parts = json.loads(found[1:])
        raise RequestError(parts.pop("what"), **parts)
    return np.frombuffer(found, "<f4", offset=1).astype(np.float32)
