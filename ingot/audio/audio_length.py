"""A file's own word on its length.

Covers what a header promises, or the end of an Ogg file, beside what is there. FFmpeg reads a file that was
cut off to its end and says nothing. Reads heads and ends only, and decodes nothing.

    length_of("wav", stream, container, track).promised          # seconds, or None
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from av import AudioStream
    from av.container import InputContainer

_NO_LENGTH = 0x7F000000  # bytes, and more: from pipes 4 GiB less a little by ffmpeg, 2 GiB by sox
_MICROSECONDS = 1e6
_LARGEST_PAGE = 27 + 255 + 255 * 255  # bytes of Ogg
_LAST = 4  # flag of an Ogg page
_MOST_CHUNKS = 1000
_COUNTED = re.compile(rb"(?:Xing|Info)\0\0\0[\x01\x03\x05\x07\x09\x0b\x0d\x0f](.{4})|VBRI.{10}(.{4})", re.S)
_FIRST_FRAMES = 4096  # bytes of an MP3 in which the count of its frames is
_BOXES = (b"ftyp", b"mdat", b"moov", b"free", b"skip", b"wide")  # with which an MP4 begins


class Length(NamedTuple):
    """``promised``: seconds that the file says it has; ``end``: where what an encoder appended begins, in
    seconds; ``fault``: what the file's end lacks. None: the file does not say.
    """

    promised: float | None = None
    end: float | None = None
    fault: str | None = None


def length_of(kind: str, stream: IO[bytes], container: InputContainer, track: AudioStream) -> Length:
    """Of a container that FFmpeg knows by ``kind``; where the stream stands does not change."""
    at = stream.tell()
    found = _length_of(kind, stream, container, track)
    stream.seek(at)
    return found


def _length_of(kind: str, stream: IO[bytes], container: InputContainer, track: AudioStream) -> Length:
    if kind == "wav":
        return Length(_wav_seconds(stream, track))
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
    """Whether a WAV's samples go on to its end, whatever the header says: it names the largest length, or
    more than a second of what is no chunk follows. Its recorder was killed, or wrote into a pipe. Where the
    length is 0 FFmpeg itself reads all.
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
    """Whether it is an MP4 that ends before, or inside, the box that says where its samples are."""
    size = stream.seek(0, io.SEEK_END)
    for place, (kind, at, length) in enumerate(_boxes(stream, size)):
        if place == 0 and kind not in _BOXES:
            return False
        if kind == b"moov":
            return at + length > size
    return size > 0 and _read_at(stream, 4, 4) in _BOXES


def _boxes(stream: IO[bytes], size: int) -> Iterator[tuple[bytes, int, int]]:
    at = 0
    for _ in range(_MOST_CHUNKS):
        head = _read_at(stream, at, 16)
        if len(head) < 8:
            return
        length = int.from_bytes(head[:4], "big")
        length = int.from_bytes(head[8:16], "big") if length == 1 else length or size - at
        yield head[4:8], at, length
        at += max(length, 8)


class _Data(NamedTuple):
    """Where a WAV's samples begin, how many bytes they are, and how many a second takes by the header."""

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


def _wav_seconds(stream: IO[bytes], track: AudioStream) -> float | None:
    found = _wav_data(stream)
    if found is None or not found.size:
        return None
    there = stream.seek(0, io.SEEK_END) - found.at
    if found.size >= _NO_LENGTH and there < found.size:
        return None
    rate = _bytes_per_second(track) or found.bytes_per_second
    return found.size / rate if rate else None


def _bytes_per_second(track: AudioStream) -> float:
    """Of PCM; 0 for other codecs."""
    name = track.codec_context.name
    digits = re.search(r"\d+", name)
    bits = (int(digits[0]) if digits else 8) if name.startswith("pcm_") else 0
    return track.sample_rate * track.channels * bits / 8


def _mp3_seconds(stream: IO[bytes], rate: int) -> float | None:
    """By the count that an encoder of variable bit rates writes in front."""
    head = _read_at(stream, 0, 10)
    tag = sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:])) + 10 if head[:3] == b"ID3" else 0
    found = _COUNTED.search(_read_at(stream, tag, _FIRST_FRAMES))
    if found is None:
        return None
    return int.from_bytes(found[1] or found[2], "big") * (1152 if rate >= 32_000 else 576) / rate


def _ogg_length(stream: IO[bytes], track: AudioStream) -> Length:
    """The last page is whole. A recorder that is stopped often does not mark it; then nothing may follow. Of
    Vorbis its granule is where the samples end.
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
