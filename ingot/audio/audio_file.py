"""A recording's file, decoded by FFmpeg (PyAV).

Covers which containers and codecs are read, which track of a file, and whether all of the file was there.
FFmpeg reads the given stream alone: containers that name other files are not read, and it opens nothing.

    with AudioFile(stream, "talk.m4a", max_seconds=3600.0) as file:
        for block in file.blocks(): ...             # samples as they are stored, some rate, some channels
        file.check_end(allow_truncated=False)
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ingot.audio.audio_length import goes_on, lacks_index, length_of
from ingot.errors import RequestError, to_install

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream, Packet
    from av.container import InputContainer

PACKAGES = ("av", "soxr")
FORMATS = "wav, aiff, flac, mp3, aac, m4a, mp4, mov, ogg, opus, webm, mkv"
TAKE_WHAT_IS_THERE = "get the file again, or take what is there (allow_truncated)"  # to fix a cut file
MOST_CHANNELS = 16
_RATES = (1_000, 768_000)
_CONTAINERS = "wav,aiff,flac,mp3,aac,mov,ogg,matroska"
_CODECS = (
    *("aac", "ac3", "alac", "amrnb", "amrwb", "dca", "eac3", "flac", "gsm_ms", "mp2", "mp2float", "mp3"),
    *("mp3float", "opus", "speex", "vorbis", "adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms"),
)  # and all of PCM
_MOST_STREAMS = 100
_BLOCK = 1 << 20  # values of a block at least, unless the format changes or the file ends
_MISSING_SECONDS = 1.0  # that may be missing: some writers count a little more than they write
_LONGEST_PACKET = 60.0  # seconds
_PADDING_SECONDS = 0.2  # behind what a track says: the encoder's, in AAC
_ODD_ENDS = ("flac", "aac", "mov")  # containers in which a broken last packet means that the file was cut off


class Block(NamedTuple):
    """``samples``: [channels, N], as they are stored; ``rate``: in Hz."""

    samples: np.ndarray
    rate: int

    def is_like(self, other: Block) -> bool:
        """Whether another block may be joined to this one."""
        mine, theirs = self.samples, other.samples
        return (self.rate, mine.dtype, len(mine)) == (other.rate, theirs.dtype, len(theirs))


class AudioFile:
    """A stream with a recording.

    Args:
        name: of the file, for errors.
        max_seconds: of what the file says of its length, before anything is decoded.

    Raises:
        RequestError: it has no audio that is read, or is out of range.
    """

    def __init__(self, stream: IO[bytes], name: str, max_seconds: float) -> None:
        self.name, self._stream, self._most = name, stream, max_seconds
        if not stream.read(1):
            raise RequestError("the recording is empty", seen=f"{name}: 0 bytes", fix="another file")
        self._container = self._opened(sized=False)
        if self._container.format.name == "mp3":  # whose padding FFmpeg reads where it knows the size
            self._container.close()
            self._container = self._opened(sized=True)
        self._kind = self._container.format.name.partition(",")[0]
        try:
            self._track = self._audio_track()
            self._check(self._track.sample_rate, self._track.channels)
            self._length = length_of(self._kind, stream, self._container, self._track)
            if (self._length.promised or 0.0) > max_seconds:
                raise self.too_long(self._length.promised or 0.0)
        except BaseException:
            self._container.close()
            raise
        self._decoded = self._reached = self._lost = 0.0  # seconds
        self._ends_inside = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._container.close()

    def blocks(self) -> Iterator[Block]:
        """All samples, in order, without what an encoder appended. What a decoder refuses is left out, and
        counted for ``check_end``.
        """
        last: Block | None = None
        for block in self._blocks():
            is_short = block.samples.shape[1] < _PADDING_SECONDS * block.rate  # to hold all of the padding
            if is_short and last is not None and last.is_like(block):
                last = Block(np.concatenate([last.samples, block.samples], 1), block.rate)
                continue
            if last is not None:
                yield last
            last = block
        if last is not None:
            end = last.samples.shape[1] - round(self._padding() * last.rate)
            yield Block(last.samples[:, : max(end, 0)], last.rate)

    def _blocks(self) -> Iterator[Block]:
        parts: list[np.ndarray] = []
        now, values = ("", 0, 0), 0
        for frame in self._frames():
            if not frame.samples:
                continue
            form = frame.format.name, frame.sample_rate, frame.layout.nb_channels
            if parts and (form != now or values >= _BLOCK):
                yield _block(parts, *now)
                parts, values = [], 0
            if form != now:
                self._check(*form[1:])
                now = form
            parts.append(frame.to_ndarray())
            values += parts[-1].size
            self._decoded += frame.samples / frame.sample_rate
        if parts:
            yield _block(parts, *now)

    def seconds(self) -> float:
        """The length that the file says, or that its packets have."""
        if self._length.promised is not None:
            return self._length.promised
        return sum(map(_seconds, self._packets()))

    def _padding(self) -> float:
        """Seconds behind the end of the track that came out of the decoder, where the track says its end."""
        over = 0.0 if self._length.end is None else self._decoded - self._length.end
        return over if 0.0 < over < _PADDING_SECONDS else 0.0

    def check_end(self, *, allow_truncated: bool) -> None:
        """Whether all was there, once the blocks are read.

        Raises:
            RequestError: the file was cut off or is damaged, unless that is allowed.
        """
        if allow_truncated:
            return
        promised = self._length.promised or 0.0
        there = max(self._decoded, self._reached if self._kind in ("mov", "matroska") else 0.0)
        if promised - there > _MISSING_SECONDS:
            raise _ends_early(f"{self.name}: {there:.1f} of {promised:.1f} s")
        if self._length.fault is not None:
            raise _ends_early(f"{self.name}: {there:.1f} s, {self._length.fault}")
        if self._ends_inside and self._kind in _ODD_ENDS:
            raise _ends_early(f"{self.name}: {there:.1f} s, and a part of a frame")
        if self._lost > _MISSING_SECONDS and self._kind != "mp3":  # between whose frames there may be junk
            seen = f"{self.name}: {self._lost:.1f} of {there:.1f} s cannot be decoded"
            raise RequestError("the audio is damaged", seen=seen, fix=TAKE_WHAT_IS_THERE)

    def too_long(self, seconds: float) -> RequestError:
        """What is wrong with a recording of so many seconds."""
        allowed = f"at most {self._most:.0f} s"
        return RequestError("the audio is too long", seen=f"{self.name}: {seconds:.0f} s", allowed=allowed)

    def _opened(self, *, sized: bool) -> InputContainer:
        import av

        options = {
            "format_whitelist": _CONTAINERS,
            "codec_whitelist": ",".join([*_CODECS, *(one for one in av.codecs_available if _is_pcm(one))]),
            "protocol_whitelist": "none",
            "max_streams": str(_MOST_STREAMS),
        }
        if goes_on(self._stream):
            options["ignore_length"] = "1"
        self._stream.seek(0)
        given = _Unnamed(self._stream, sized)
        try:
            return av.open(given, "r", metadata_errors="replace", io_open=_refuse, options=options)
        except av.FFmpegError as error:
            if lacks_index(self._stream):
                seen = f"{self.name}: without its index (moov), nothing can be decoded"
                fix = "get the file again; it was cut off"
                raise RequestError("the audio ends early", seen=seen, fix=fix) from None
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> RequestError:
        what, seen = "this is no audio that can be read", f"{self.name}: {getattr(error, 'strerror', error)}"
        return RequestError(what, seen=seen, allowed=FORMATS, fix="convert the file")

    def _audio_track(self) -> AudioStream:
        from av.codec.context import Flags2

        streams = self._container.streams
        if not streams.audio:
            kinds = ", ".join(sorted({stream.type for stream in streams})) or "nothing"
            seen, fix = f"{self.name}: {kinds}", "a file with sound"
            raise RequestError("the file has no audio track", seen=seen, fix=fix)
        track: Any = streams.best("audio") or streams.audio[0]
        codec = track.codec_context
        name = "unknown" if codec is None else codec.name
        if name not in _CODECS and not _is_pcm(name):
            seen, allowed = f"{self.name}: {name}", "PCM, FLAC, MP3, AAC, ALAC, Vorbis, Opus and others"
            what, fix = "audio of this codec is not read", "convert the file"
            raise RequestError(what, seen=seen, allowed=allowed, fix=fix)
        codec.thread_count = 1
        self._cuts = name == "vorbis" and self._kind == "ogg"
        if self._cuts:  # in place of FFmpeg, which cuts too much of a file with a single page
            codec.flags2 |= Flags2.skip_manual
        found: AudioStream = track
        return found

    def _check(self, rate: int, channels: int) -> None:
        if not _RATES[0] <= rate <= _RATES[1]:
            seen, allowed = f"{self.name}: {rate}", f"{_RATES[0]} to {_RATES[1]} Hz"
            raise RequestError("the sampling rate is out of range", seen=seen, allowed=allowed)
        if not 1 <= channels <= MOST_CHANNELS:
            seen, allowed = f"{self.name}: {channels}", f"1 to {MOST_CHANNELS}"
            raise RequestError("the number of channels is out of range", seen=seen, allowed=allowed)

    def _frames(self) -> Iterator[AudioFrame]:
        import av

        for packet in self._packets():
            try:
                frames = packet.decode()
            except av.FFmpegError:
                self._lost += _seconds(packet)
                self._ends_inside = True
                continue
            if packet.size:
                self._ends_inside = packet.is_corrupt
            yield from frames[1:] if self._cuts else frames
            self._cuts = self._cuts and not frames  # the first block of Vorbis is half of nothing

    def _packets(self) -> Iterator[Packet[AudioStream]]:
        """Of the track; ``_reached`` is of all tracks where only the file as a whole says its length."""
        import av

        packets = self._container.demux(*([] if self._kind == "matroska" else [self._track]))
        while True:
            try:
                packet: Any = next(packets, None)
            except av.FFmpegError:
                if self._kind == "ogg":  # a recording of another kind follows
                    what, fix = "there are several recordings in one file", "one recording per file"
                    raise RequestError(what, seen=self.name, fix=fix) from None
                self._ends_inside = True
                return
            if packet is None:
                return
            if packet.pts is not None:
                self._reached = max(self._reached, float(packet.pts * packet.time_base) + _seconds(packet))
            if packet.stream_index == self._track.index:
                yield packet


class _Unnamed:
    """A stream as FFmpeg reads it: without a name, since its content alone says what it is, and unless
    ``sized`` without an end, so that a length is one that the file says and no estimate.
    """

    def __init__(self, stream: IO[bytes], sized: bool) -> None:
        self._stream, self._sized = stream, sized

    def read(self, count: int) -> bytes:
        return self._stream.read(count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and not self._sized:
            return -1
        try:
            return self._stream.seek(offset, whence)
        except (OSError, ValueError):
            return -1

    def tell(self) -> int:
        return self._stream.tell()


def _refuse(url: str, flags: int, options: object) -> Any:
    """What FFmpeg gets in place of a file that a file names."""
    raise PermissionError("a recording may not name other files")


def _block(parts: list[np.ndarray], form: str, rate: int, channels: int) -> Block:
    samples = np.concatenate(parts, axis=1)
    return Block(samples if form.endswith("p") else samples.reshape(-1, channels).T, rate)


def _seconds(packet: Any) -> float:
    found = float((packet.duration or 0) * packet.time_base)
    return found if found < _LONGEST_PACKET else 0.0  # of a page alone FFmpeg says 2**32 samples less some


def _is_pcm(codec: str) -> bool:
    return codec.startswith("pcm_") and codec != "pcm_s64le" and codec != "pcm_s64be"


def _ends_early(seen: str) -> RequestError:
    return RequestError("the audio ends early", seen=seen, fix=TAKE_WHAT_IS_THERE)


def check_packages() -> None:
    """Refuse to read where packages are missing.

    Raises:
        RequestError: one is.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"reading audio needs {' and '.join(missing)}", fix=to_install("speech"))
