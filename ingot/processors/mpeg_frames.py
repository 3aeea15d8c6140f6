"""MP3 files by their frames: how many there are, how many were promised, and a head that says so.

Owns the walk over frame headers (ISO/IEC 11172-3 and 13818-3, layer III), tags and junk between them, and the
frame with the count in front of the first (Xing or Info, or VBRI). libsndfile guesses the length of a file
without a Xing frame from its first frame and its size, and reads no further than it guessed. Decodes nothing.

    frames = scanned(stream)
    if frames is not None and not frames.told:
        stream = counted(stream, frames)         # now libsndfile knows how many there are
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

# kbit/s by the index in a header, and Hz; 0 is a bit rate that a header does not tell.
_KILOBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KILOBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_HERTZ = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}  # by version
_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]")
_SYNC_OR_TAG = re.compile(_SYNC.pattern + rb"|ID3|TAG")
_INFO = re.compile(rb"(?:Xing|Info)\0\0\0[\x01\x03\x05\x07\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
_INFO_ENDS = 54  # bytes of a frame with its count
_COUNT_SLACK = 2  # frames: some encoders count the frame with the count
_PIECE = 1 << 16
_MOST_DOUBTS = 20_000  # tags, and bytes that look like a header and are none; of noise one in 3000


class _Header(NamedTuple):
    length: int  # bytes
    samples: int
    stream: tuple[int, int, bool]  # what one recording has alike: version, Hz, whether mono


@dataclass(frozen=True)
class MpegFrames:
    """What a file holds.

    Attributes:
        start: the offset of the first frame with audio.
        count: frames with audio.
        promised: how many the first frame promises; None where it does not.
        told: whether libsndfile knows how many there are.
        samples: per frame and channel.
        rate: Hz.
        mixed: whether frames differ in what one recording has alike.
    """

    start: int
    count: int
    promised: int | None
    told: bool
    samples: int
    rate: int
    mixed: bool

    def seconds(self, count: int) -> float:
        """Of so many frames."""
        return count * self.samples / self.rate


def scanned(stream: BinaryIO) -> MpegFrames | None:
    """The frames of a file, read in pieces; None where there are none."""
    first: tuple[int, _Header] | None = None
    count, mixed = 0, False
    for at, header in _frames(stream):
        first = first or (at, header)
        mixed = mixed or header.stream != first[1].stream
        count += 1
    if first is None:
        return None
    at, header = first
    promised, xing = _promised(read_at(stream, at, _INFO_ENDS))
    if promised is not None:
        at, count = at + header.length, count - 1
    told = xing and promised is not None and count <= promised + _COUNT_SLACK
    return MpegFrames(at, count, promised, told, header.samples, header.stream[1], mixed)


def counted(stream: BinaryIO, frames: MpegFrames) -> io.RawIOBase:
    """The same recording behind a first frame that tells how many follow, in place of its own."""
    head = bytearray(read_at(stream, frames.start, 4))
    head[1] |= 1  # no checksum
    head[2] = head[2] & 0x0C | 0x90  # the bit rate of index 9, no padding
    header = _parsed(head)
    assert header is not None  # its fields are those of a header
    mono, first = header.stream[2], header.stream[0] == 3
    tag = 4 + (17 if mono else 32) if first else 4 + (9 if mono else 17)
    head += bytes(header.length - 4)
    head[tag : tag + 12] = b"Info" + (1).to_bytes(4, "big") + frames.count.to_bytes(4, "big")
    return _Headed(bytes(head), stream, frames.start)


def _frames(stream: BinaryIO) -> Iterator[tuple[int, _Header]]:
    """Offsets and headers. One that differs from the last, or is behind what is no frame, needs another
    behind it: its bytes occur in other data, too.
    """
    at, last, doubts = 0, None, 0
    while True:
        head = read_at(stream, at, 10)
        header = _parsed(head)
        if header is not None and (header.stream == last or _goes_on(stream, at, header)):
            yield at, header
            at, last = at + header.length, header.stream
            continue
        last, doubts = None, doubts + 1
        skipped = _tag_length(head)
        if not skipped:
            found = _next_sync(stream, at + 1)
            skipped = 0 if found is None else found - at
        if not skipped or doubts > _MOST_DOUBTS:
            return
        at += skipped


def _parsed(head: bytes | bytearray) -> _Header | None:
    if len(head) < 4 or not _SYNC.match(head):
        return None
    version, bits, hertz = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if hertz == 3:
        return None
    rate = _HERTZ[version][hertz]
    kilobits = (_KILOBITS_1 if version == 3 else _KILOBITS_2)[bits]
    samples = 1152 if version == 3 else 576
    length = samples // 8 * kilobits * 1000 // rate + (head[2] >> 1 & 1)
    return _Header(length, samples, (version, rate, head[3] >> 6 == 3))


def _goes_on(stream: BinaryIO, at: int, header: _Header) -> bool:
    following = _parsed(read_at(stream, at + header.length, 4))
    return following is not None and following.stream == header.stream


def _tag_length(head: bytes) -> int:
    """Bytes of a tag (ID3v1, ID3v2); 0 where there is none."""
    if head[:3] == b"ID3" and len(head) == 10 and max(head[6:10]) < 0x80:
        size = sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:10]))
        return 10 + size + (10 if head[5] & 0x10 else 0)
    return 128 if head[:3] == b"TAG" else 0


def _next_sync(stream: BinaryIO, at: int) -> int | None:
    while piece := read_at(stream, at, _PIECE):
        if found := _SYNC_OR_TAG.search(piece):
            return at + found.start()
        if len(piece) < 3:
            return None
        at += len(piece) - 2
    return None


def _promised(frame: bytes) -> tuple[int | None, bool]:
    """Frames that are promised, and whether in a way that libsndfile reads."""
    found = _INFO.search(frame, 4)
    if found:
        return int.from_bytes(found[1], "big"), True
    if frame[36:40] == b"VBRI" and len(frame) == _INFO_ENDS:
        return int.from_bytes(frame[50:54], "big"), False
    return None, False


def read_at(stream: BinaryIO, at: int, count: int) -> bytes:
    """At most so many bytes from an offset on."""
    stream.seek(at)
    return stream.read(count)


class _Headed(io.RawIOBase):
    """A head, then a stream from an offset on."""

    def __init__(self, head: bytes, stream: BinaryIO, start: int) -> None:
        self._head, self._stream, self._start = head, stream, start
        self._size = len(head) + stream.seek(0, io.SEEK_END) - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._head[self._at : self._at + len(buffer)]
        rest = max(self._at - len(self._head), 0)
        data += read_at(self._stream, self._start + rest, len(buffer) - len(data))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
