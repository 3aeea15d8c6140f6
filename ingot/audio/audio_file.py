"""Recordings decoded by FFmpeg (PyAV), and whether all of the file was there."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from fractions import Fraction
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ingot.audio.audio_length import goes_on, lacks_index, length_of
from ingot.errors import RequestError, to_install

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream, Packet
    from av.audio.fifo import AudioFifo
    from av.container import InputContainer

PACKAGES = ("av", "soxr")
FORMATS = "wav, aiff, flac, mp3, aac, m4a, mp4, mov, ogg, opus, webm, mkv"
TAKE_WHAT_IS_THERE = "get the file again, or take what is there (allow_truncated)"  # fix of a truncated file
MOST_CHANNELS = 16
_RATES = (1_000, 768_000)
_CONTAINERS = "wav,aiff,flac,mp3,aac,mov,ogg,matroska"
_CODECS = (
    *("aac", "ac3", "alac", "amrnb", "amrwb", "dca", "eac3", "flac", "gsm_ms", "mp2", "mp2float", "mp3"),
    *("mp3float", "opus", "speex", "vorbis", "adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms"),
)  # and all of PCM
_MOST_STREAMS = 100
_BLOCK = 1 << 20  # least values of a block, unless the format changes or the file ends
_JOINED = 1 << 15  # least values of a joined frame, likewise: few enough for a core's cache
_MISSING_SECONDS = 1.0  # that may be missing: some writers count a little more than they write
_LONGEST_PACKET = 60.0  # seconds
_PADDING_SECONDS = 0.2  # most that an encoder of AAC appends to a track
_ODD_ENDS = ("flac", "aac", "mov")  # containers in which a broken last packet means a truncated file


class Block(NamedTuple):
    """``samples``: [channels, N], as stored; ``rate``: in Hz."""

    samples: np.ndarray
    rate: int

    def is_like(self, other: Block) -> bool:
        """Whether another block can be joined to this one."""
        mine, theirs = self.samples, other.samples
        return (self.rate, mine.dtype, len(mine)) == (other.rate, theirs.dtype, len(theirs))


class AudioFile:
    """A stream with a recording. FFmpeg reads only the given stream, and no container that names other files.

    Args:
        name: of the file, for errors.
        max_seconds: limit of the length that the file states, checked before anything is decoded.

    Raises:
        RequestError: it has no supported audio, or is out of range.
    """

    def __init__(self, stream: IO[bytes], name: str, max_seconds: float) -> None:
        self.name, self._stream, self._most = name, stream, max_seconds
        if not stream.read(1):
            raise RequestError("the recording is empty", seen=f"{name}: 0 bytes", fix="another file")
        self._container = self._opened(sized=False)
        if self._container.format.name == "mp3":  # FFmpeg reads its padding only if it knows the size
            self._container.close()
            self._container = self._opened(sized=True)
        self._kind = self._container.format.name.partition(",")[0]
        try:
            self._track = self._audio_track()
            self._check(self._track.sample_rate, self._track.channels)
            at = stream.tell()
            self._length = length_of(self._kind, stream, self._container, self._track)
            stream.seek(at)
            if (self._length.promised or 0.0) > max_seconds:
                raise self.too_long(self._length.promised or 0.0)
        except BaseException:
            self._container.close()
            raise
        self._decoded = self._reached = self._lost = 0.0  # seconds
        self._ends_inside = False

    def close(self) -> None:
        """Close the container; the stream stays open."""
        self._container.close()

    def blocks(self) -> Iterator[Block]:
        """All samples, in order, without an encoder's padding. What cannot be decoded is left out, and
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
            padding = 0.0 if self._length.end is None else self._decoded - self._length.end
            padding = padding if 0.0 < padding < _PADDING_SECONDS else 0.0
            end = last.samples.shape[1] - round(padding * last.rate)
            yield Block(last.samples[:, : max(end, 0)], last.rate)

    def _blocks(self) -> Iterator[Block]:
        parts: list[np.ndarray] = []
        now, values = ("", 0, 0), 0
        for frame in self._joined_frames():
            form = frame.format.name, frame.sample_rate, frame.layout.nb_channels
            if parts and (form != now or values >= _BLOCK):
                yield _block(parts, *now)
                parts, values = [], 0
            now = form
            parts.append(frame.to_ndarray())
            values += parts[-1].size
        if parts:
            yield _block(parts, *now)

    def _joined_frames(self) -> Iterator[AudioFrame]:
        """Neighbours of one form as one frame: FFmpeg joins them in a fraction of NumPy's time. ``_decoded``
        counts them; a form that is out of range is an error.
        """
        from av.audio.fifo import AudioFifo

        now, joined = ("", 0, "", 0), AudioFifo()
        for frame in self._frames():
            if not frame.samples:
                continue
            form = frame.format.name, frame.sample_rate, frame.layout.name, frame.layout.nb_channels
            if form != now:
                yield from _all_of(joined)
                self._check(form[1], form[3])
                now, joined = form, AudioFifo()
            frame.pts = None  # the queue would check that times are continuous
            joined.write(frame)
            self._decoded += frame.samples / frame.sample_rate
            if joined.samples * form[3] >= _JOINED:
                yield from _all_of(joined)
        yield from _all_of(joined)

    def seconds(self) -> float:
        """The length that the file states, or that of its packets."""
        if self._length.promised is not None:
            return self._length.promised
        return sum(map(_seconds, self._packets()))

    def check_end(self, *, allow_truncated: bool) -> None:
        """Check, once the blocks are read, that the file was complete. Raises ``RequestError`` if the file
        was cut off or is damaged, unless that is allowed.
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
        if self._lost > _MISSING_SECONDS and self._kind != "mp3":  # which may have junk between frames
            seen = f"{self.name}: {self._lost:.1f} of {there:.1f} s cannot be decoded"
            raise RequestError("the audio is damaged", seen=seen, fix=TAKE_WHAT_IS_THERE)

    def too_long(self, seconds: float) -> RequestError:
        """The error of a recording of so many seconds."""
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
            what, seen = "this is no audio that can be read", f"{self.name}: {error.strerror}"
            raise RequestError(what, seen=seen, allowed=FORMATS, fix="convert the file") from None

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
        if self._cuts:  # we do it, as FFmpeg cuts too much of a file with a single page
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
            self._cuts = self._cuts and not frames  # the first block of Vorbis overlaps nothing

    def _packets(self) -> Iterator[Packet[AudioStream]]:
        """The track's packets; ``_reached`` counts all tracks where only the whole file has a length."""
        import av

        packets = self._container.demux(*([] if self._kind == "matroska" else [self._track]))
        bases: dict[int, Fraction] = {}
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
                index = packet.stream_index
                base = bases[index] if index in bases else bases.setdefault(index, packet.time_base)
                self._reached = max(self._reached, _in_seconds(packet.pts, base) + _lasting(packet, base))
            if packet.stream_index == self._track.index:
                yield packet


class _Unnamed:
    """A stream as FFmpeg reads it: without a name, so that only the content decides the format, and unless
    ``sized`` without an end, so that FFmpeg cannot estimate a length.
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
    """Refuse to open a file that the recording names."""
    raise PermissionError("a recording may not name other files")


def _all_of(queue: AudioFifo) -> Iterator[AudioFrame]:
    """What is in the queue, as one frame; nothing if it is empty."""
    frame = queue.read()
    if frame is not None:
        yield frame


def _block(parts: list[np.ndarray], form: str, rate: int, channels: int) -> Block:
    samples = np.concatenate(parts, axis=1)
    return Block(samples if form.endswith("p") else samples.reshape(-1, channels).T, rate)


def _in_seconds(count: int, base: Fraction) -> float:
    """``float(count * base)``, whose Fraction would take longer than a packet's other fields."""
    return count * base.numerator / base.denominator


def _seconds(packet: Any) -> float:
    return _lasting(packet, packet.time_base)


def _lasting(packet: Any, base: Fraction) -> float:
    found = _in_seconds(packet.duration or 0, base)
    return found if found < _LONGEST_PACKET else 0.0  # FFmpeg says nearly 2**32 samples for a single page


def _is_pcm(codec: str) -> bool:
    return codec.startswith("pcm_") and codec != "pcm_s64le" and codec != "pcm_s64be"


def _ends_early(seen: str) -> RequestError:
    return RequestError("the audio ends early", seen=seen, fix=TAKE_WHAT_IS_THERE)


def check_packages() -> None:
    """Raise ``RequestError`` where a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"reading audio needs {' and '.join(missing)}", fix=to_install("speech"))
