"""Recordings as samples: one channel at 16 kHz, in float32."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ingot.audio.audio_file import AudioFile, Block, check_packages
from ingot.errors import RequestError

if TYPE_CHECKING:
    import torch

RATE = 16_000  # samples per second
SUFFIXES = (
    *(".wav", ".wave", ".aiff", ".aif", ".flac", ".mp3", ".mpga", ".aac", ".m4a", ".m4b", ".mp4", ".m4v"),
    *(".mov", ".3gp", ".ogg", ".oga", ".opus", ".webm", ".weba", ".mkv", ".mka"),
)  # of recordings in a folder
MOST_SECONDS = 6 * 3600.0
Recording = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]
_LOUDEST = 16.0  # of a sample: 24 dB over full scale, which floating-point recorders may write
_GROWTH = 256 * RATE  # samples by which the result grows: 16 MiB
_INTEGERS = {"uint8": 1 << 7, "int16": 1 << 15, "int32": 1 << 31}  # dtypes of samples, and their full scale


def read_audio(
    source: Recording, max_seconds: float = MOST_SECONDS, *, allow_truncated: bool = False
) -> torch.Tensor:
    """``read_samples`` as a tensor."""
    import torch  # not in a server's limited process, where it would take most of the memory

    return torch.from_numpy(read_samples(source, max_seconds, allow_truncated=allow_truncated))


def read_samples(
    source: Recording, max_seconds: float = MOST_SECONDS, *, allow_truncated: bool = False
) -> np.ndarray:
    """Samples of a file: float32 [N], full scale is -1 to 1, one channel at 16 kHz.

    Channels are averaged. Of a video the audio track is read. Memory: 4 bytes per sample, 230 MB per hour.

    Args:
        source: a path, a file's bytes, or a file open for reading bytes.
        allow_truncated: take what is there of a file that was cut off or damaged.

    Raises:
        RequestError: it is no recording, too long, empty, cut off, out of range, or a package is missing.
    """
    with _opened(source, max_seconds) as file:
        found = _Samples(max_seconds, file)
        for block in file.blocks():
            found.add(block)
        samples = found.end()
        file.check_end(allow_truncated=allow_truncated)
    if not len(samples):
        raise RequestError("the recording is empty", seen=f"{file.name}: 0 samples", fix="another file")
    return samples


def audio_seconds(source: Recording) -> float:
    """A recording's length, without decoding it; 0 where that cannot be read."""
    try:
        with _opened(source, MOST_SECONDS) as file:
            return min(file.seconds(), MOST_SECONDS)
    except RequestError:
        return 0.0


def samples_of_array(array: np.ndarray) -> np.ndarray:
    """Samples [N] of an array: float32, scaled by its dtype. Raises ``RequestError`` if the shape, the dtype
    or a value is not valid for samples.
    """
    if array.ndim != 1:
        seen = f"shape {tuple(array.shape)}"
        raise RequestError("samples must be numbers [N], one channel at 16 kHz", seen=seen)
    samples = _scaled(array)
    if samples is None:
        fix = "divide by full scale, so that samples are -1 to 1"
        what, allowed = "samples of this type have no known scale", f"{', '.join(_INTEGERS)}, floats"
        raise RequestError(what, seen=array.dtype, allowed=allowed, fix=fix)
    _check_values(samples, "samples")
    return samples if samples.flags.writeable and samples.flags.c_contiguous else samples.copy()


def mixed(values: np.ndarray) -> np.ndarray:
    """The mean of channels [channels, N]."""
    if len(values) == 1:
        return values[0]
    if len(values) == 2:  # the same to the bit; NumPy's mean of interleaved channels takes far longer
        return (values[0] + values[1]) / 2
    mean: np.ndarray = values.mean(0)
    return mean


def no_such_file(name: str) -> RequestError:
    return RequestError("there is no such audio file", seen=name, fix="another path")


@contextmanager
def _opened(source: Recording, max_seconds: float) -> Iterator[AudioFile]:
    check_packages()
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        try:
            stream: IO[bytes] = Path(source).open("rb")  # noqa: SIM115
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise no_such_file(name) from None
        except OSError as error:
            what = f"the audio file cannot be read ({error.strerror})"
            raise RequestError(what, seen=name, fix="another path") from None
    else:
        data: object = source
        if not isinstance(source, bytes | bytearray | memoryview):
            data = source.read() if hasattr(source, "read") else None
        if not isinstance(data, bytes | bytearray | memoryview):
            seen = type(source).__name__ if data is None else f"{type(source).__name__} of text"
            allowed = "a path, a file's bytes, or a file that is open for reading bytes"
            raise RequestError("this is no recording", seen=seen, allowed=allowed)
        name, stream = "the bytes", io.BytesIO(data)
    with stream, closing(AudioFile(stream, name, max_seconds)) as file:
        yield file


class _Samples:
    """Samples of a file's blocks, in one array that grows in place."""

    def __init__(self, max_seconds: float, file: AudioFile) -> None:
        self._most, self._file = max_seconds, file
        self._array, self._count = np.empty(0, np.float32), 0
        self._rate, self._resampler = 0, None
        self._seconds = 0.0

    def add(self, block: Block) -> None:
        """Append a block, of any rate."""
        if block.rate != self._rate:
            self._flush()
            self._rate, self._resampler = block.rate, _resampler(block.rate)
        self._seconds += block.samples.shape[1] / block.rate
        if self._seconds > self._most:
            raise self._file.too_long(self._seconds)
        values = _scaled(block.samples)
        assert values is not None, "decoders have no other types"
        mono = mixed(values)
        self._append(mono if self._resampler is None else self._resampler.resample_chunk(mono))

    def end(self) -> np.ndarray:
        """All samples."""
        self._flush()
        self._array.resize(self._count, refcheck=False)
        return self._array

    def _flush(self) -> None:
        if self._resampler is not None:
            self._append(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))

    def _append(self, part: np.ndarray) -> None:
        _check_values(part, self._file.name)
        end = self._count + len(part)
        if end > len(self._array):
            self._array.resize(end + _GROWTH, refcheck=False)
        self._array[self._count : end] = part
        self._count = end


def _resampler(rate: int) -> Any:
    import soxr

    return None if rate == RATE else soxr.ResampleStream(rate, RATE, 1, dtype="float32")


def _scaled(samples: np.ndarray) -> np.ndarray | None:
    """float32, full scale is -1 to 1; None: the dtype has no known scale."""
    name = samples.dtype.name
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    if name not in _INTEGERS:
        return None
    found = samples.astype(np.float32)
    if name == "uint8":
        found -= _INTEGERS[name]
    found /= _INTEGERS[name]
    return found


def _check_values(samples: np.ndarray, name: str) -> None:
    if not len(samples):
        return
    loudest = max(-float(samples.min()), float(samples.max()))
    if not np.isfinite(loudest):
        raise RequestError("the audio has samples that are no numbers", seen=name, fix="convert the file")
    if loudest > _LOUDEST:
        seen, fix = f"{name}: {loudest:.6g}", "divide by full scale, 32768 for integers of 16 bits"
        raise RequestError("samples are out of range", seen=seen, allowed="-1 to 1", fix=fix)
