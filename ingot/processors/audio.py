"""Audio files → samples as speech models take them.

Owns decoding (soundfile), mixing to one channel and resampling (soxr), all in blocks, and the bounds that are
checked before anything is decoded. Knows no features and no model.

    samples = read_audio("talk.mp3")        # float32 [N] at 16 kHz
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.errors import RequestError

if TYPE_CHECKING:
    import torch

RATE = 16_000  # samples per second
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus")  # of recordings in a folder
MOST_SECONDS = 6 * 3600.0
MOST_CHANNELS = 16
_RATES = (1_000, 768_000)
_BLOCK_SECONDS = 30
_MISSING_SECONDS = 1.0  # a file's own count of its frames is an estimate in some formats
_NO_LENGTH = 0x7FFFFF00  # bytes, and more; 4 GiB less a little from ffmpeg, 2 GiB from sox
_FORMATS = "wav, flac, ogg or mp3"


def read_audio(source: str | Path | bytes, max_seconds: float = MOST_SECONDS) -> torch.Tensor:
    """``read_samples`` as a tensor."""
    import torch  # not for the limited process of a server, whose memory it would be most of

    return torch.from_numpy(read_samples(source, max_seconds))


def read_samples(source: str | Path | bytes, max_seconds: float = MOST_SECONDS) -> np.ndarray:
    """Samples of a file, or of a file's bytes: float32 [N] in -1 to 1, one channel at 16 kHz.

    Channels are averaged. Memory: 4 bytes per sample, 230 MB an hour.

    Raises:
        RequestError: it is no audio, too long, has too many channels, or ends before it says; a package is
            missing.
    """
    _check_packages()
    import soundfile

    name = "the bytes" if isinstance(source, bytes) else str(source)
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            _check(file, name, max_seconds)
            _check_length(file, source, name)
            return _samples(file, name, max_seconds)
    except soundfile.SoundFileError as error:
        if not isinstance(source, bytes) and not Path(source).is_file():
            raise RequestError("there is no such audio file", seen=name, fix="the path") from None
        what = getattr(error, "error_string", str(error))
        raise RequestError(
            "this is no audio that can be read",
            seen=f"{name}: {what}",
            allowed=_FORMATS,
            fix="convert the file",
        ) from None


def audio_seconds(source: str | Path | bytes) -> float:
    """A recording's length by its header; 0 where that cannot be read."""
    _check_packages()
    import soundfile

    try:
        found = soundfile.info(io.BytesIO(source) if isinstance(source, bytes) else str(source))
    except soundfile.SoundFileError:
        return 0.0
    return min(float(found.frames) / found.samplerate, MOST_SECONDS)


def _check(file: Any, name: str, max_seconds: float) -> None:
    """Bounds on what the header says."""
    if not _RATES[0] <= file.samplerate <= _RATES[1]:
        allowed = f"{_RATES[0]} to {_RATES[1]} Hz"
        raise RequestError(
            "the sampling rate is out of range", seen=f"{name}: {file.samplerate}", allowed=allowed
        )
    if file.channels > MOST_CHANNELS:
        seen = f"{name}: {file.channels}"
        raise RequestError("too many channels", seen=seen, allowed=f"at most {MOST_CHANNELS}")
    if file.frames > max_seconds * file.samplerate:
        raise _too_long(name, file.frames / file.samplerate, max_seconds)


def _check_length(file: Any, source: str | Path | bytes, name: str) -> None:
    """A wav file's own length against what is there: soundfile counts the frames that are left. Who writes
    into a pipe names no length, or the largest.
    """
    if file.format != "WAV":
        return
    if isinstance(source, bytes):
        head, there = source[:8], len(source)
    else:
        with Path(source).open("rb") as start:
            head, there = start.read(8), Path(source).stat().st_size
    promised = int.from_bytes(head[4:8], "little")
    if head[:4] != b"RIFF" or not 0 < promised < _NO_LENGTH:
        return
    bytes_per_second = max(there // max(file.frames, 1), 1) * file.samplerate
    if promised - there > _MISSING_SECONDS * bytes_per_second:
        seen = f"{name}: {there} of {promised + 8} bytes"
        raise RequestError("the audio ends early", seen=seen, fix="get the file again; it was cut off")


def _samples(file: Any, name: str, max_seconds: float) -> np.ndarray:
    import soxr

    same = file.samplerate == RATE
    stream = None if same else soxr.ResampleStream(file.samplerate, RATE, 1, dtype="float32")
    parts: list[np.ndarray] = []
    frames, promised = 0, file.frames
    for block in file.blocks(_BLOCK_SECONDS * file.samplerate, dtype="float32", always_2d=True):
        frames += len(block)
        if frames > max_seconds * file.samplerate:
            raise _too_long(name, frames / file.samplerate, max_seconds)
        mono = block[:, 0].copy() if block.shape[1] == 1 else block.mean(1)
        parts.append(mono if stream is None else stream.resample_chunk(mono))
    if stream is not None:
        parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    if promised - frames > _MISSING_SECONDS * file.samplerate:
        seen = f"{name}: {frames / file.samplerate:.1f} of {promised / file.samplerate:.1f} s"
        raise RequestError("the audio ends early", seen=seen, fix="get the file again; it was cut off")
    samples = np.concatenate([*parts, np.zeros(0, np.float32)])
    if not np.isfinite(samples).all():
        raise RequestError("the audio has samples that are no numbers", seen=name, fix="convert the file")
    return samples


def _too_long(name: str, seconds: float, most: float) -> RequestError:
    return RequestError(
        "the audio is too long", seen=f"{name}: {seconds:.0f} s", allowed=f"at most {most:.0f} s"
    )


def _check_packages() -> None:
    missing = [name for name in ("soundfile", "soxr") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"reading audio needs {' and '.join(missing)}", fix="pip install 'ingot[speech]'")
