"""Audio files → samples as speech models take them.

Owns decoding (soundfile), mixing to one channel and resampling (soxr), all in blocks, and the bounds that are
checked before anything is decoded. Knows no features and no model.

    samples = read_audio("talk.mp3")        # float32 [N] at 16 kHz
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ingot.errors import RequestError, to_install
from ingot.processors.audio_length import (
    MISSING_SECONDS,
    check_chunks,
    check_pages,
    ends_early,
    whole_mpeg,
)

if TYPE_CHECKING:
    import torch

RATE = 16_000  # samples per second
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus")  # of recordings in a folder
MOST_SECONDS = 6 * 3600.0
MOST_CHANNELS = 16
_RATES = (1_000, 768_000)
_BLOCK_SECONDS = 30
_UNKNOWN_FRAMES = 1 << 62  # and more: libsndfile found no number
_FORMATS = "wav, flac, ogg or mp3"
_CHECKED = ("WAV", "WAVEX", "RF64", "AIFF", "FLAC", "OGG", "MP3")  # of libsndfile's: a cut one is told


def read_audio(source: str | Path | bytes, max_seconds: float = MOST_SECONDS) -> torch.Tensor:
    """``read_samples`` as a tensor."""
    import torch  # not for the limited process of a server, whose memory it would be most of

    return torch.from_numpy(read_samples(source, max_seconds))


def read_samples(source: str | Path | bytes, max_seconds: float = MOST_SECONDS) -> np.ndarray:
    """Samples of a file, or of a file's bytes: float32 [N] in -1 to 1, one channel at 16 kHz.

    Channels are averaged. Memory: 4 bytes per sample, 230 MB an hour.

    Raises:
        RequestError: it is no audio, too long, has too many channels, ends before it says (wav, aiff, flac,
            Ogg, MP3 with a count of its frames), or holds several recordings (Ogg, unlike ones in MP3); a
            package is missing.
    """
    _check_packages()
    import soundfile

    name = "the bytes" if isinstance(source, bytes) else str(source)
    if _is_raw(source):
        fix = "convert the file"
        raise RequestError("raw samples do not tell their rate", seen=name, allowed=_FORMATS, fix=fix)
    try:
        with _opened(source) as stream:
            return _decoded(stream, name, max_seconds)
    except OSError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            raise no_such_file(name) from None
        what = f"the audio file cannot be read ({error.strerror})"
        raise RequestError(what, seen=name, fix="another path") from None
    except soundfile.SoundFileError as error:
        what = getattr(error, "error_string", str(error))
        raise RequestError(
            "this is no audio that can be read",
            seen=f"{name}: {what}",
            allowed=_FORMATS,
            fix="convert the file",
        ) from None


def no_such_file(name: str) -> RequestError:
    """What is wrong with a name that no file has."""
    return RequestError("there is no such audio file", seen=name, fix="another path")


def audio_seconds(source: str | Path | bytes) -> float:
    """A recording's length by its header; 0 where that cannot be read."""
    _check_packages()
    import soundfile

    if _is_raw(source):
        return 0.0
    try:
        found = soundfile.info(io.BytesIO(source) if isinstance(source, bytes) else str(source))
    except soundfile.SoundFileError:
        return 0.0
    if found.frames >= _UNKNOWN_FRAMES:
        return 0.0
    return min(float(found.frames) / found.samplerate, MOST_SECONDS)


def _opened(source: str | Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")


def _is_raw(source: str | Path | bytes) -> bool:
    """Whether soundfile takes it for samples without a header: it goes by this suffix alone."""
    return not isinstance(source, bytes) and Path(source).suffix.lower() == ".raw"


def _decoded(stream: BinaryIO, name: str, max_seconds: float) -> np.ndarray:
    import soundfile

    with soundfile.SoundFile(stream) as file:
        kind, subtype, frames, rate = file.format, file.subtype, file.frames, file.samplerate
    if kind not in _CHECKED:
        seen = f"{name}: {kind}"
        raise RequestError(
            "audio of this kind is not read", seen=seen, allowed=_FORMATS, fix="convert the file"
        )
    sound: BinaryIO | io.RawIOBase | None = stream
    if kind == "OGG":
        check_pages(stream, name)
    elif kind == "MP3":
        sound = whole_mpeg(stream, name) if subtype == "MPEG_LAYER_III" else None
    else:
        check_chunks(stream, frames, rate, name)
    (sound or stream).seek(0)
    with soundfile.SoundFile(sound or stream) as file:
        _check(file, name, max_seconds)
        return _samples(file, name, max_seconds, is_estimate=sound is None)


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
    if file.frames >= _UNKNOWN_FRAMES:
        fix = "write it to a file, not into a pipe"
        raise RequestError("the file does not tell how long it is", seen=name, fix=fix)
    if file.frames > max_seconds * file.samplerate:
        raise _too_long(name, file.frames / file.samplerate, max_seconds)


def _samples(file: Any, name: str, max_seconds: float, is_estimate: bool) -> np.ndarray:
    import soxr

    same = file.samplerate == RATE
    stream = None if same else soxr.ResampleStream(file.samplerate, RATE, 1, dtype="float32")
    parts: list[np.ndarray] = []
    frames, promised = 0, file.frames
    for block in _blocks(file):
        frames += len(block)
        if frames > max_seconds * file.samplerate:
            raise _too_long(name, frames / file.samplerate, max_seconds)
        mono = block[:, 0].copy() if block.shape[1] == 1 else block.mean(1)
        parts.append(mono if stream is None else stream.resample_chunk(mono))
    if stream is not None:
        parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    if promised - frames > MISSING_SECONDS * file.samplerate and not is_estimate:
        raise ends_early(f"{name}: {frames / file.samplerate:.1f} of {promised / file.samplerate:.1f} s")
    samples = np.concatenate([*parts, np.zeros(0, np.float32)])
    if not np.isfinite(samples).all():
        raise RequestError("the audio has samples that are no numbers", seen=name, fix="convert the file")
    return samples


def _blocks(file: Any) -> Iterator[np.ndarray]:
    """Views [frames, channels] of what was read, valid until the next. soundfile's own ``blocks`` yields what
    was promised: behind a file's end that is memory of others.
    """
    buffer = np.zeros((min(_BLOCK_SECONDS * file.samplerate, file.frames), file.channels), np.float32)
    while len(buffer):
        block = file.read(out=buffer)
        if len(block):
            yield block
        if len(block) < len(buffer):
            return


def _too_long(name: str, seconds: float, most: float) -> RequestError:
    return RequestError(
        "the audio is too long", seen=f"{name}: {seconds:.0f} s", allowed=f"at most {most:.0f} s"
    )


def _check_packages() -> None:
    missing = [name for name in ("soundfile", "soxr") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"reading audio needs {' and '.join(missing)}", fix=to_install("speech"))
