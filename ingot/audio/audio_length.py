"""The length that a recording's file states, by which a file that was cut off is noticed."""

from __future__ import annotations

import io
import re
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from av import AudioStream
    from av.container import InputContainer

_NO_LENGTH = 0x7F000000  # bytes; more mean a pipe: ffmpeg writes nearly 4 GiB then, and sox 2 GiB
_MICROSECONDS = 1e6
_LARGEST_PAGE = 27 + 255 + 255 * 255  # bytes of Ogg
_LAST = 4  # flag of an Ogg page
_MOST_CHUNKS = 1000
_COUNTED = re.compile(rb"(?:Xing|Info)\0\0\0[\x01\x03\x05\x07\x09\x0b\x0d\x0f](.{4})|VBRI.{10}(.{4})", re.S)
_FIRST_FRAMES = 4096  # bytes of an MP3 that contain the count of its frames
_BOXES = (b"ftyp", b"mdat", b"moov", b"free", b"skip", b"wide")  # first boxes of an MP4


class Length(NamedTuple):
    """``promised``: the length that the file states, in seconds; ``end``: where an encoder's padding begins,
    in seconds; ``fault``: what is wrong with the file's end. None: the file does not say.
    """

    promised: float | None = None
    end: float | None = None
    fault: str | None = None


def length_of(kind: str, stream: IO[bytes], container: InputContainer, track: AudioStream) -> Length:
    """The length that a file of FFmpeg's format ``kind`` states; moves the stream.

    FFmpeg reads a truncated file to its end without an error. Of an MP3 without a count of frames it
    estimates a length, and of an Ogg it drops a partial last page, so neither shows what is missing.
    """
    if kind == "wav":
        data = _wav_data(stream)
        if data is None or not data.size:
            return Length()
        rate = _bytes_per_second(track) or data.bytes_per_second
        is_open = data.size >= _NO_LENGTH and stream.seek(0, io.SEEK_END) - data.at < data.size
        return Length(data.size / rate if rate and not is_open else None)
    if kind == "mp3":
        return Length(_mp3_seconds(stream, track.sample_rate))
    if kind == "ogg":
        return _ogg_length(stream, track)
    if kind == "matroska":
        return Length(container.duration / _MICROSECONDS if container.duration else None)
    if kind == "aac" or not track.duration or not track.time_base:
        return Length()
    promised = float(track.duration * track.time_base)
    if kind == "aiff" and promised * _bytes_per_second(track) >= _NO_LENGTH:
        return Length()
    return Length(promised, promised if kind == "mov" else None)


def goes_on(stream: IO[bytes]) -> bool:
    """Whether a WAV's samples go on to its end, as of a killed recorder or a pipe: the header has the largest
    length, or more than a second that is no chunk follows. If the length is 0, FFmpeg itself reads all.
    """
    found = _wav_data(stream)
    if found is None or not found.size:
        return False
    end = found.at + found.size
    rest = stream.seek(0, io.SEEK_END) - end
    if found.size >= _NO_LENGTH or not found.bytes_per_second:
        return rest < 0
    following = _read_at(stream, end + found.size % 2, 4)
    return rest > found.bytes_per_second and not re.fullmatch(rb"[A-Za-z0-9_ ]{4}", following)


def lacks_index(stream: IO[bytes]) -> bool:
    """Whether it is an MP4 that ends before or inside the box that locates its samples (moov)."""
    size = stream.seek(0, io.SEEK_END)
    if _read_at(stream, 4, 4) not in _BOXES:
        return False
    at = 0
    for _ in range(_MOST_CHUNKS):
        head = _read_at(stream, at, 16)
        if len(head) < 8:
            break
        length = int.from_bytes(head[:4], "big")
        length = int.from_bytes(head[8:16], "big") if length == 1 else length or size - at
        if head[4:8] == b"moov":
            return at + length > size
        at += max(length, 8)
    return True


class _Data(NamedTuple):
    """Where a WAV's samples begin, their bytes, and bytes per second by the header."""

    at: int
    size: int
    bytes_per_second: int


def _wav_data(stream: IO[bytes]) -> _Data | None:
    head = _read_at(stream, 0, 12)
    if head[:4] not in (b"RIFF", b"RIFX", b"RF64", b"BW64") or head[8:] != b"WAVE":
        return None
    order = "big" if head[:4] == b"RIFX" else "little"
    at, long_size, rate = 12, 0, 0
    for _ in range(_MOST_CHUNKS):
        chunk = _read_at(stream, at, 24)
        kind, size = chunk[:4], int.from_bytes(chunk[4:8], order)  # type: ignore[arg-type]
        if kind == b"data":
            return _Data(at + 8, long_size if long_size and size == 0xFFFFFFFF else size, rate)
        if len(chunk) < 24:
            return None
        if kind == b"ds64":
            long_size = int.from_bytes(chunk[16:24], "little")
        if kind == b"fmt ":
            rate = int.from_bytes(chunk[16:20], order)  # type: ignore[arg-type]
        at += 8 + size + size % 2
    return None


def _bytes_per_second(track: AudioStream) -> float:
    """For PCM; 0 for other codecs."""
    name = track.codec_context.name
    digits = re.search(r"\d+", name)
    bits = (int(digits[0]) if digits else 8) if name.startswith("pcm_") else 0
    return track.sample_rate * track.channels * bits / 8


def _mp3_seconds(stream: IO[bytes], rate: int) -> float | None:
    """The length by the count of frames that an encoder writes at the start."""
    head = _read_at(stream, 0, 10)
    tag = sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:])) + 10 if head[:3] == b"ID3" else 0
    found = _COUNTED.search(_read_at(stream, tag, _FIRST_FRAMES))
    if found is None:
        return None
    return int.from_bytes(found[1] or found[2], "big") * (1152 if rate >= 32_000 else 576) / rate


def _ogg_length(stream: IO[bytes], track: AudioStream) -> Length:
    """The last page must be complete. A stopped recorder often does not mark it; then nothing may follow. For
    Vorbis its granule is the end of the samples.
    """
    size = stream.seek(0, io.SEEK_END)
    end = _read_at(stream, max(size - 2 * _LARGEST_PAGE, 0), 2 * _LARGEST_PAGE)
    page = end[max(end.rfind(b"OggS"), 0) :]
    length = 27 + page[26] + sum(page[27 : 27 + page[26]]) if len(page) > 26 else size + 1
    is_whole = len(page) >= length if page[5:6] and page[5] & _LAST else len(page) == length
    if not is_whole or page[:4] != b"OggS":
        return Length(fault="and a part of a page")
    is_vorbis = track.codec_context.name == "vorbis"
    return Length(end=int.from_bytes(page[6:14], "little") / track.sample_rate if is_vorbis else None)


def _read_at(stream: IO[bytes], at: int, count: int) -> bytes:
    """At most so many bytes from an offset on."""
    stream.seek(at)
    return stream.read(count)
