"""Decodes untrusted recordings in a process of its own (``LimitedProcess``)."""

from __future__ import annotations

import struct

import numpy as np

from ingot.audio.audio_file import TAKE_WHAT_IS_THERE
from ingot.audio.recording_samples import RATE, read_samples
from ingot.errors import RequestError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.sandbox.limited_worker import failure, raise_failure

_SECONDS = struct.Struct("<d")
_SAMPLES = b"samp"  # four bytes, so that the samples after them are aligned
_CPU_SECONDS = 30.0
_AUDIO_PER_CPU_SECOND = 100.0  # seconds that the slowest format and resampling can process
_LIBRARIES = 1 << 30  # bytes of address space


def limits(max_seconds: float) -> ProcessLimits:
    """Limits for recordings of at most so many seconds, whose samples may be copied once while they grow."""
    return ProcessLimits(
        seconds=_CPU_SECONDS + max_seconds / _AUDIO_PER_CPU_SECOND,
        memory=_LIBRARIES + 2 * int(max_seconds * RATE) * 4,
        nice=10,
    )


def question(data: bytes, max_seconds: float) -> bytes:
    """A file's bytes, and the seconds that they may have."""
    return _SECONDS.pack(max_seconds) + data


def answer_bytes(asked: bytes | bytearray) -> list[bytes | memoryview]:
    """The samples, or the error."""
    (max_seconds,) = _SECONDS.unpack_from(asked)
    try:
        samples = read_samples(memoryview(asked)[_SECONDS.size :], max_seconds)
        return [_SAMPLES, samples.astype("<f4", copy=False).data.cast("B")]
    except RequestError as error:
        if error.fix == TAKE_WHAT_IS_THERE:
            error.fix = "send all of the file"
        return failure(error)


def samples_of(found: bytearray) -> np.ndarray:
    """Samples of an answer, in its memory; raises as ``read_samples``."""
    raise_failure(found)
    return np.frombuffer(found, "<f4", offset=len(_SAMPLES)).astype(np.float32, copy=False)
