"""Files that were cut off, and several recordings in one file: nothing is lost without a word."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ingot.errors import RequestError
from ingot.processors import audio, audio_length
from ingot.processors.audio import read_samples
from ingot.processors.mpeg_frames import scanned

RATES = [8000, 11025, 16000, 22050, 32000, 44100, 48000]
ID3 = (
    b"ID3\x03\0\0" + bytes([0, 1, 0, 0]) + b"\xff\xfb\x90" * 5461 + b"\0"
)  # a picture that looks like frames
OGG = [("OGG", "VORBIS"), ("OGG", "OPUS")]


def noise(seconds: float, rate: int = 16000, channels: int = 1) -> np.ndarray:
    """[frames, channels]; only its second half is loud, so its bit rate changes."""
    wave = np.random.default_rng(1).normal(size=(int(seconds * rate), channels)) * 0.2
    wave[: len(wave) // 2] *= 1e-3
    return wave.astype(np.float32)


def encoded(
    samples: np.ndarray, kind: str, rate: int = 16000, subtype: str | None = None, **more: Any
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype, **more)
    return file.getvalue()


def mp3(samples: np.ndarray, rate: int = 16000, counted: bool = True, mode: str = "VARIABLE") -> bytes:
    """With the count of its frames in front, or without."""
    data = encoded(samples, "MP3", rate, bitrate_mode=mode, compression_level=0.5)
    frames = scanned(io.BytesIO(data))
    assert frames is not None
    assert frames.start > 0
    return data if counted else data[frames.start :]


CUT = [
    ("WAV", None, "ends early.*of 320044 bytes"),
    ("WAVEX", None, "ends early.*of 320080 bytes"),
    ("RF64", None, "ends early.*of 320104 bytes"),
    ("AIFF", None, "ends early.*of 320054 bytes"),
    ("MP3", None, r"ends early.*\d\.\d of 10\.\d s.*was cut off"),
    ("OGG", "VORBIS", "ends early.*bytes without a last page"),
    ("OGG", "OPUS", "ends early.*bytes without a last page"),
    ("FLAC", None, "no audio that can be read.*lost sync"),
]


@pytest.mark.parametrize(("kind", "subtype", "message"), CUT)
@pytest.mark.parametrize("part", [0.3, 0.5, 0.85])
def test_a_file_that_was_cut_off(
    tmp_path: Path, kind: str, subtype: str | None, message: str, part: float
) -> None:
    whole = encoded(noise(10.0), kind, subtype=subtype)
    assert len(read_samples(whole)) == 160_000
    path = tmp_path / "cut"
    path.write_bytes(whole[: int(len(whole) * part)])
    for source in (path, path.read_bytes()):
        with pytest.raises(RequestError, match=message):
            read_samples(source)


def test_a_wav_of_the_other_byte_order() -> None:
    whole = encoded(noise(10.0), "WAV", endian="BIG")
    assert (whole[:4], len(read_samples(whole))) == (b"RIFX", 160_000)
    with pytest.raises(RequestError, match="ends early"):
        read_samples(whole[:100_000])


@pytest.mark.parametrize(("kind", "at", "size"), [("AIFF", 4, 4), ("RF64", 20, 8)])
def test_lengths_of_files_from_pipes(kind: str, at: int, size: int) -> None:
    whole = encoded(noise(10.0), kind)
    for unknown in (bytes(size), b"\xff" * size):
        assert len(read_samples(whole[:at] + unknown + whole[at + size :])) == 160_000


def test_nothing_of_another_recording_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a recording leaves is not that of the next, which promises more than it has."""
    loud = encoded(np.full((20 * 16000, 1), 0.75, np.float32), "WAV")
    whole = mp3(noise(20.0) * 0.1)
    cut = whole[: len(whole) // 2]
    monkeypatch.setattr(audio, "MISSING_SECONDS", 60.0)  # so that the samples come back
    monkeypatch.setattr(audio_length, "MISSING_SECONDS", 60.0)
    found = []
    for _ in range(3):
        assert read_samples(loud).max() == 0.75
        found.append(read_samples(cut))
    assert 16_000 < len(found[0]) < 19 * 16_000
    assert np.abs(found[0]).max() < 0.3
    assert all(np.array_equal(one, found[0]) for one in found)


def test_a_cut_file_always_gives_the_same_error() -> None:
    whole = mp3(noise(20.0))
    found = set()
    for value in (0.1, 0.75):
        read_samples(encoded(np.full((20 * 16000, 1), value, np.float32), "WAV"))
        with pytest.raises(RequestError, match="ends early") as error:
            read_samples(whole[: len(whole) // 2])
        found.add(str(error.value))
    assert len(found) == 1


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_healthy_mp3s_are_heard_whole(rate: int, mode: str) -> None:
    """With a count of their frames to the sample, without one to what an encoder adds."""
    for channels in (1, 2):
        samples = noise(8.0, rate, channels)
        seconds = len(read_samples(mp3(samples, rate, mode=mode))) / 16000
        assert seconds == pytest.approx(8.0, abs=1e-3)
        seconds = len(read_samples(mp3(samples, rate, counted=False, mode=mode))) / 16000
        assert 8.0 <= seconds < 8.25


@pytest.mark.parametrize("rate", RATES)
def test_an_mp3_of_so_few_bits_that_it_has_no_count(rate: int) -> None:
    data = encoded(noise(8.0, rate), "MP3", rate, bitrate_mode="CONSTANT", compression_level=0.99)
    frames = scanned(io.BytesIO(data))
    assert frames is not None
    assert frames.promised is None
    assert 8.0 <= len(read_samples(data)) / 16000 < 8.25


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("loud_first", [True, False])
def test_mp3s_one_behind_the_other(counted: bool, loud_first: bool) -> None:
    """Tags between them are left out, also such as look like frames."""
    samples = noise(20.0)[:: -1 if loud_first else 1]
    one = mp3(samples, counted=counted)
    tail = b"TAG" + bytes(125)
    for between in (b"", tail + ID3, b"APETAGEX" + b"a word " * 100):
        joined = read_samples(ID3 + one + between + one + tail)
        assert 40.0 <= len(joined) / 16000 < 40.4
        loudness = np.abs(joined[: 40 * 16000]).reshape(8, -1).mean(1)
        np.testing.assert_allclose(loudness[:4], loudness[4:], rtol=0.1, atol=0.005)


def test_a_mistaken_count_is_not_believed() -> None:
    """Some encoders count the first frame, too; more is another recording."""
    whole = bytearray(mp3(noise(20.0)))
    at = whole.index(b"Xing") + 8
    count = int.from_bytes(whole[at : at + 4], "big")
    for wrong, least in ((count + 1, 20.0), (count - 1, 19.9), (count // 2, 20.0)):
        whole[at : at + 4] = wrong.to_bytes(4, "big")
        assert least <= len(read_samples(bytes(whole))) / 16000 < 20.2
    whole[at : at + 4] = (2 * count).to_bytes(4, "big")
    with pytest.raises(RequestError, match=r"ends early.*20\.\d of 40\.\d s"):
        read_samples(bytes(whole))


def test_a_guess_of_libsndfile_is_no_promise() -> None:
    """Of layer II, it takes all frames to be as long as the first."""
    silence = [bytes([0xFF, 0xFD, 0x10 | padding << 1, 0xC0]) + bytes(100 + padding) for padding in (0, 1)]
    data = silence[0] + silence[1] * 9000
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.subtype, file.frames - 9001 * 1152 > 44100) == ("MPEG_LAYER_II", True)
    assert len(read_samples(data)) == pytest.approx(9001 * 1152 * 16 / 44.1, abs=1)


def test_a_count_that_libsndfile_does_not_know() -> None:
    """Fraunhofer's."""
    frames = mp3(noise(20.0), counted=False)
    count = 20 * 16000 // 576 + 4
    head = frames[:2] + b"\x98" + frames[3:4] + bytes(32) + b"VBRI" + bytes(10)
    whole = head + count.to_bytes(4, "big") + bytes(360 - 54) + frames  # 80 kbit/s
    assert 20.0 <= len(read_samples(whole)) / 16000 < 20.2
    with pytest.raises(RequestError, match=r"ends early.*of 20\.\d s"):
        read_samples(whole[: len(whole) * 3 // 4])


def test_what_looks_like_a_header_is_none_alone() -> None:
    whole = mp3(noise(5.0))
    for junk in (b"\xff\xf3\x94\xc4", b"\xff\xfb\x90\0"):  # of 24 and of 44.1 kHz
        assert len(read_samples(whole + junk + bytes(1000))) == 80_000


def test_an_mp3_that_libsndfile_leaves_in_the_middle_is_named() -> None:
    whole = mp3(noise(20.0), counted=False)
    other_frames = b"\xff\xfb\x90\0" + bytes(413) + b"\xff\xfb\x90"
    with pytest.raises(RequestError, match=r"ends early.*20\.\d of 40\.\d s"):
        read_samples(whole + other_frames + whole)


@pytest.mark.parametrize(("rate", "channels"), [(24000, 1), (16000, 2)])
def test_unlike_mp3s_in_one_file(rate: int, channels: int) -> None:
    other = mp3(noise(5.0, rate, channels), rate)
    with pytest.raises(RequestError, match=r"several recordings.*one recording per file"):
        read_samples(mp3(noise(5.0)) + other)


@pytest.mark.parametrize(("kind", "subtype"), OGG)
def test_ogg_files_one_behind_the_other(kind: str, subtype: str) -> None:
    one = encoded(noise(10.0), kind, subtype=subtype)
    cut = one[: one.rindex(b"OggS")]
    for joined in (one + one, one + bytes(100_000) + one, cut + one):
        with pytest.raises(RequestError, match="several recordings in one file"):
            read_samples(joined)
    with pytest.raises(RequestError, match="ends early"):
        read_samples(one[:-1])
    assert len(read_samples(one + b"TAG" + bytes(125))) == 160_000


@pytest.mark.parametrize(("kind", "subtype"), OGG)
def test_an_ogg_file_of_whole_pages_whose_end_is_not_marked(kind: str, subtype: str) -> None:
    """A recorder that was stopped. One byte more or less, or another, and it was cut off or damaged."""
    samples = noise(10.0)[
        : -104 if subtype == "OPUS" else None
    ]  # its frames are full: only the end may cut one
    whole = encoded(samples, kind, subtype=subtype)
    last = whole.rindex(b"OggS")
    page = bytearray(whole[last:])
    page[5] &= ~4
    page[22:26] = ogg_checksum(page)
    unmarked = whole[:last] + page
    assert len(read_samples(unmarked)) == pytest.approx(len(samples), abs=320)
    assert 0.8 * len(samples) < len(read_samples(whole[:last])) < len(samples)
    damaged = unmarked[:-1] + bytes([unmarked[-1] ^ 1])
    for cut in (unmarked[:-1], unmarked + b"O", unmarked + b"OggS", whole[: last + 26], damaged):
        with pytest.raises(RequestError, match="ends early"):
            read_samples(cut)


def ogg_checksum(page: bytes | bytearray) -> bytes:
    """The long division itself, bit by bit."""
    value = int.from_bytes(page[:22] + bytes(4) + page[26:], "big") << 32
    while (over := value.bit_length() - 33) >= 0:
        value ^= 0x104C11DB7 << over
    return value.to_bytes(4, "little")


def test_heads_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of nothing but junk, or of heads, is neither in memory nor slow."""

    class Counting(io.BytesIO):
        largest = reads = 0

        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            self.largest, self.reads = max(self.largest, len(found)), self.reads + 1
            return found

    whole = mp3(noise(5.0))
    for junk in (
        bytes(1 << 22),
        b"\xff" * (1 << 22),
        b"\xff\xfb\x90" * (1 << 20),
        b"\xff\xfb\x90\0" * (1 << 20),
    ):
        stream = Counting(whole + junk)
        assert scanned(stream) is not None
        assert stream.largest <= 1 << 16
        assert stream.reads < 150_000
    stream = Counting(encoded(noise(5.0), "OGG") + bytes(1 << 22))
    audio_length.check_pages(stream, "a")
    assert stream.largest <= 1 << 16
    assert stream.reads < 1000


@pytest.mark.parametrize("kind", ["W64", "AU", "VOC", "CAF"])
def test_kinds_that_would_be_cut_without_a_word(kind: str) -> None:
    with pytest.raises(RequestError, match=f"this kind is not read.*{kind}.*wav, flac, ogg or mp3"):
        read_samples(encoded(noise(1.0), kind))
