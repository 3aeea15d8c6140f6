"""A recording's own word on its length, against what the file holds.

Owns the heads of wav and aiff files, the pages of Ogg (RFC 3533) and what the count of an MP3's frames means.
libsndfile counts what is left of a file that was cut off, and stops behind the first of several recordings.
Reads heads only, in pieces, and decodes nothing.

    sound = whole_mpeg(stream, "talk.mp3")       # what to decode in place of the stream
"""

from __future__ import annotations

import io
from typing import BinaryIO

from ingot.errors import RequestError
from ingot.processors.mpeg_frames import counted, read_at, scanned

MISSING_SECONDS = 1.0  # that may be missing: some writers count a little more than they write
_NO_LENGTH = 0x7F000000  # bytes, and more; from pipes 4 GiB less a little by ffmpeg, 2 GiB by sox
_BEGINS, _ENDS = 0x02, 0x04  # flags of an Ogg page
_PIECE = 1 << 16


def check_chunks(stream: BinaryIO, frames: int, rate: int, name: str) -> None:
    """The length in the head of a wav (also WAVEX and RF64) or aiff file against what is there, where
    libsndfile finds ``frames``. Who writes into a pipe names no length, or the largest.

    Raises:
        RequestError: more than a second is missing.
    """
    promised, there = _promised_bytes(read_at(stream, 0, 28)), stream.seek(0, io.SEEK_END)
    bytes_per_second = max(there // max(frames, 1), 1) * rate
    if promised is not None and promised - there > MISSING_SECONDS * bytes_per_second:
        raise ends_early(f"{name}: {there} of {promised} bytes")


def _promised_bytes(head: bytes) -> int | None:
    if head[:4] in (b"RIFF", b"RIFX", b"FORM"):
        promised = int.from_bytes(head[4:8], "little" if head[:4] == b"RIFF" else "big")
        return promised + 8 if 0 < promised < _NO_LENGTH else None
    if head[:4] == b"RF64" and head[12:16] == b"ds64":
        promised = int.from_bytes(head[20:28], "little")
        return promised + 8 if 0 < promised < 1 << 62 else None
    return None


def check_pages(stream: BinaryIO, name: str) -> None:
    """The pages of an Ogg file: the last is whole, and none begins a second recording behind others. A
    recorder that is stopped often does not mark the last page; then nothing may follow it.

    Raises:
        RequestError: the file ends inside a page, or there is a second recording.
    """
    start, at, flags, size, went_on = 0, 0, 0, stream.seek(0, io.SEEK_END), False
    while (found := _next_page(stream, at)) is not None:
        start, head = found
        flags = head[5]
        if flags & _BEGINS and went_on:
            raise several(name)
        went_on = went_on or not flags & _BEGINS
        at = start + 27 + head[26] + sum(head[27 : 27 + head[26]])
    is_whole = at <= size if flags & _ENDS else at == size and _is_page(read_at(stream, start, at - start))
    if not is_whole:
        raise ends_early(f"{name}: {size} bytes without a last page")


def _is_page(page: bytes) -> bool:
    """Whether an Ogg page has the checksum that it tells: CRC-32 of 0x04c11db7, from 0, bits as they come."""
    checksum = 0
    for byte in page[:22] + bytes(4) + page[26:]:
        checksum = checksum << 8 & 0xFFFFFFFF ^ _CRC[checksum >> 24 ^ byte]
    return checksum == int.from_bytes(page[22:26], "little")


def _crc_of(byte: int) -> int:
    value = byte << 24
    for _ in range(8):
        value = value << 1 ^ (0x104C11DB7 if value >> 31 else 0)
    return value


def _next_page(stream: BinaryIO, at: int) -> tuple[int, bytes] | None:
    """Where the next page begins, and its head; mostly it is right there."""
    while True:
        piece = read_at(stream, at, 27 + 255)
        if piece[:4] != b"OggS":
            piece = read_at(stream, at, _PIECE)
            found = piece.find(b"OggS")
            if found < 0 and len(piece) < _PIECE:
                return None
            at += found if found >= 0 else len(piece) - 3
        elif len(piece) < 27:
            return None
        else:
            return at, piece


_CRC = [_crc_of(byte) for byte in range(256)]


def whole_mpeg(stream: BinaryIO, name: str) -> BinaryIO | io.RawIOBase | None:
    """What to decode in place of an MP3, so that all its frames are heard: also those behind a first
    recording that is shorter, and of a file without a count, whose length libsndfile guesses. Of such a file
    nobody knows whether it was cut off. None where no frame is found: libsndfile's guess is all there is.

    Raises:
        RequestError: more than a second of the promised frames is missing, or recordings differ.
    """
    frames = scanned(stream)
    if frames is None:
        return None
    if frames.mixed:
        raise several(name)
    promised = frames.count if frames.promised is None else frames.promised
    if frames.seconds(promised - frames.count) > MISSING_SECONDS:
        there, said = frames.seconds(frames.count), frames.seconds(promised)
        raise ends_early(f"{name}: {there:.1f} of {said:.1f} s")
    return stream if frames.told else counted(stream, frames)


def ends_early(seen: str) -> RequestError:
    return RequestError("the audio ends early", seen=seen, fix="get the file again; it was cut off")


def several(name: str) -> RequestError:
    return RequestError("there are several recordings in one file", seen=name, fix="one recording per file")
