"""Recordings are decoded in a limited process, with the same result and without harm to others."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile

from ingot.audio.audio_worker import limits, question, samples_of
from ingot.audio.recording_samples import read_audio
from ingot.errors import RequestError
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError

WORKER = "ingot.audio.audio_worker"


def flac(samples: np.ndarray, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC")
    return file.getvalue()


NOISE = np.random.default_rng(1).normal(size=44100 * 2) * 0.1
HOUR = flac(np.zeros(3600 * 16000, np.float32))


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    with LimitedProcess(WORKER, limits(60.0)) as found:
        yield found


def decoded(process: LimitedProcess, data: bytes, seconds: float = 60.0) -> np.ndarray:
    return samples_of(process.ask_bytes(question(data, seconds)))


def test_samples_are_the_same(process: LimitedProcess) -> None:
    data = flac(NOISE, 44100)
    np.testing.assert_array_equal(decoded(process, data), read_audio(data).numpy())


def test_errors_are_returned(process: LimitedProcess) -> None:
    with pytest.raises(RequestError, match=r"no audio that can be read.*wav, aiff, flac"):
        decoded(process, b"notes")
    with pytest.raises(RequestError, match=r"too long.*3600 s.*at most 60 s"):
        decoded(process, HOUR)
    data = flac(NOISE, 44100)
    with pytest.raises(RequestError, match=r"ends early.*\d\.\d of 2\.0 s.*to fix: send all of the file"):
        decoded(process, data[: len(data) // 3])
    assert len(decoded(process, flac(NOISE))) == len(NOISE)


def test_what_takes_too_much_memory_ends_alone() -> None:
    """The header's own count is a bound that a file can lie about; the process has another."""
    tight = dataclasses.replace(limits(60.0), memory=330 << 20)
    with LimitedProcess(WORKER, tight) as process:
        with pytest.raises(ProcessEndedError, match="MiB of memory"):
            decoded(process, HOUR, 7200.0)
        assert len(decoded(process, flac(NOISE))) == len(NOISE)


def test_the_process_needs_no_torch() -> None:
    """It would be most of its memory."""
    program = f"import sys, {WORKER}; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
