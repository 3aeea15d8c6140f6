"""Recordings to samples, in a process of their own.

Covers what the process is asked and what it answers. A recording is a stranger's file, which a library in C
decodes, and may be much larger than it looks.

    with LimitedProcess("ingot.audio.audio_worker", limits(60.0)) as process:
        samples = samples_of(process.ask_bytes(question(data, max_seconds=60.0)))   # float32 [N] at 16 kHz
"""

from __future__ import annotations

import json
import struct

import numpy as np

from ingot.audio.audio_file import TAKE_WHAT_IS_THERE
from ingot.audio.recording_samples import RATE, read_samples
from ingot.errors import RequestError, shown
from ingot.sandbox.limited_process import ProcessLimits

_SECONDS = struct.Struct("<d")
_SAMPLES, _ERROR = b"samp", b"fail"  # four bytes, so that samples behind them are aligned
_CPU_SECONDS = 30.0
_AUDIO_PER_CPU_SECOND = 100.0  # that the slowest format and resampling take
_LIBRARIES = 1 << 30  # bytes of address space


def limits(max_seconds: float) -> ProcessLimits:
    """For recordings of at most so many seconds, whose samples may move once while they grow."""
    return ProcessLimits(
        seconds=_CPU_SECONDS + max_seconds / _AUDIO_PER_CPU_SECOND,
        memory=_LIBRARIES + 2 * int(max_seconds * RATE) * 4,
        nice=10,
    )


def question(data: bytes, max_seconds: float) -> bytes:
    """A file's bytes, and how many seconds they may have."""
    return _SECONDS.pack(max_seconds) + data


def answer_bytes(asked: bytes | bytearray) -> list[bytes | memoryview]:
    """The samples, or the parts of the error."""
    (max_seconds,) = _SECONDS.unpack_from(asked)
    try:
        samples = read_samples(memoryview(asked)[_SECONDS.size :], max_seconds)
        return [_SAMPLES, samples.astype("<f4", copy=False).data.cast("B")]
    except RequestError as error:
        seen, allowed = (None if value is None else shown(value) for value in (error.seen, error.allowed))
        fix = "send all of the file" if error.fix == TAKE_WHAT_IS_THERE else error.fix
        parts = {"what": error.what, "seen": seen, "allowed": allowed, "fix": fix}
        return [_ERROR, json.dumps(parts).encode()]


def samples_of(found: bytearray) -> np.ndarray:
    """Samples of an answer, in its memory.

    Raises:
        RequestError: as ``read_samples``.
    """
    if found[: len(_ERROR)] == _ERROR:
        parts = json.loads(found[len(_ERROR) :])
        raise RequestError(parts.pop("what"), **parts)
    return np.frombuffer(found, "<f4", offset=len(_SAMPLES)).astype(np.float32, copy=False)
