"""Files that were cut off, and several recordings in one file: nothing is lost silently."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ingot.audio.recording_samples import audio_seconds, read_samples
from ingot.errors import RequestError
from tests.audio_files import media, wav

RATES = [8000, 11025, 16000, 22050, 32000, 44100, 48000]
ID3 = (
    b"ID3\x03\0\0" + bytes([0, 1, 0, 0]) + b"\xff\xfb\x90" * 5461 + b"\0"
)  # a picture that looks like frames
TAG = b"TAG" + bytes(125)
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
    return data if counted else data[data.index(data[:2], 4) :]


CUT = {
    "wav": (lambda sound: encoded(sound, "WAV"), r"ends early.*\d\.\d of 6\.0 s"),
    "wavex": (lambda sound: encoded(sound, "WAVEX"), r"ends early.*\d\.\d of 6\.0 s"),
    "rf64": (lambda sound: encoded(sound, "RF64"), r"ends early.*\d\.\d of 6\.0 s"),
    "other byte order": (lambda sound: encoded(sound, "WAV", endian="BIG"), r"early.*\d\.\d of 6\.0 s"),
    "24 bits": (lambda sound: encoded(sound, "WAV", 16000, "PCM_24"), r"ends early.*\d\.\d of 6\.0 s"),
    "adpcm": (lambda sound: encoded(sound, "WAV", 16000, "IMA_ADPCM"), r"ends early.*\d\.\d of 6\.\d s"),
    "aiff": (lambda sound: encoded(sound, "AIFF"), r"ends early.*\d\.\d of 6\.0 s"),
    "mp3": (lambda sound: mp3(sound), r"ends early.*\d\.\d of 6\.1 s.*get the file again"),
    "vorbis": (
        lambda sound: encoded(sound, "OGG", 16000, "VORBIS"),
        r"ends early.*\d s, and a part of a page",
    ),
    "opus": (lambda sound: encoded(sound, "OGG", 16000, "OPUS"), r"ends early.*\d s, and a part of a page"),
    "flac": (lambda sound: encoded(sound, "FLAC"), r"ends early.*\d\.\d of 6\.0 s"),
    "piped flac": (
        lambda sound: media(sound, "flac", "flac", piped=True),
        r"early.*\d s, and a part of a frame",
    ),
    "aac": (lambda sound: media(sound, "adts", "aac"), r"ends early.*\d s, and a part of a frame"),
    "webm": (lambda sound: media(sound, "webm", "libopus"), r"ends early.*\d\.\d of 6\.0 s"),
    "mkv": (lambda sound: media(sound, "matroska", "flac", video=True), r"ends early.*\d\.\d of 10\.\d s"),
    "fragments": (
        lambda sound: media(sound, "mp4", "aac", options={"movflags": "frag_keyframe+empty_moov"}),
        r"ends early.*(a part of a frame|of 6)",
    ),
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("part", [0.3, 0.75])
@pytest.mark.parametrize("kind", CUT)
def test_a_file_that_was_cut_off(tmp_path: Path, kind: str, part: float) -> None:
    """An error that says what is there; what is there, where that is allowed."""
    make, message = CUT[kind]
    whole = make(noise(6.0)[:, 0])
    full = read_samples(whole)
    path = tmp_path / "cut"
    path.write_bytes(whole[: int(len(whole) * part)])
    for source in (path, path.read_bytes()):
        with pytest.raises(RequestError, match=message) as error:
            read_samples(source)
        assert error.value.fix == "get the file again, or take what is there (allow_truncated)"
    found = read_samples(path, allow_truncated=True)
    assert 0.1 * len(full) < len(found) < len(full)
    same = len(found) - 4000  # of the last frames, a part is there
    np.testing.assert_allclose(found[:same], full[:same], atol=1e-6)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
@pytest.mark.parametrize(("container", "codec"), [("ipod", "aac"), ("mov", "pcm_s16le")])
def test_an_mp4_without_its_index(container: str, codec: str, part: float) -> None:
    """It is written last: of a phone that died nothing can be decoded."""
    whole = media(noise(10.0), container, codec)
    for allow in (False, True):
        with pytest.raises(RequestError, match=r"ends early.*without its index \(moov\)"):
            read_samples(whole[: int(len(whole) * part)], allow_truncated=allow)


def test_an_index_before_its_samples() -> None:
    whole = media(noise(10.0), "ipod", "aac")
    at, end = whole.index(b"mdat") - 4, whole.index(b"moov") - 4
    moov = bytearray(whole[end:])
    for place in range(len(moov)):  # offsets of the samples, behind the index now
        if moov[place : place + 4] == b"stco":
            for entry in range(int.from_bytes(moov[place + 8 : place + 12], "big")):
                where = slice(place + 12 + 4 * entry, place + 16 + 4 * entry)
                moov[where] = (int.from_bytes(moov[where], "big") + len(moov)).to_bytes(4, "big")
    moved = whole[:at] + bytes(moov) + whole[at:end]
    full = read_samples(whole)
    np.testing.assert_array_equal(read_samples(moved), full)
    cut = moved[: int(0.6 * len(moved))]
    with pytest.raises(RequestError, match=r"ends early.*\d\.\d of 10\.0 s"):
        read_samples(cut)
    found = read_samples(cut, allow_truncated=True)
    np.testing.assert_array_equal(found[:-2048], full[: len(found) - 2048])


PCM = (noise(10.0)[:, 0] * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize("riff", [0, 36, 0xFFFFFFFF, 12345, None])
@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 44, 0x7FFFFFDA])
def test_a_wav_whose_recorder_was_killed_or_wrote_into_a_pipe(size: int, riff: int | None) -> None:
    data = wav(PCM, size=size, riff=riff)
    np.testing.assert_array_equal(read_samples(data), np.frombuffer(PCM, "<i2") / np.float32(32768))
    assert audio_seconds(data) == pytest.approx(10.0)


def test_a_wav_whose_recorder_was_killed_between_two_updates_of_its_header() -> None:
    """Samples continue after those that the header counts; another chunk is none of them."""
    wanted = np.frombuffer(PCM, "<i2") / np.float32(32768)
    for size in (32_000, 200_000):
        np.testing.assert_array_equal(read_samples(wav(PCM, size=size)), wanted)
    chunk = b"LIST" + (60_000).to_bytes(4, "little") + bytes(60_000)
    np.testing.assert_array_equal(read_samples(wav(PCM, size=len(PCM)) + chunk), wanted)
    np.testing.assert_array_equal(read_samples(wav(PCM + bytes(20_000), size=len(PCM))), wanted)


@pytest.mark.parametrize(
    ("kind", "at", "unknown"),
    [
        ("AIFF", 4, b"\xff" * 4),
        ("RF64", 20, bytes(8)),
        ("RF64", 20, b"\xff" * 8),
        ("RF64", 28, bytes(8)),
    ],
)
def test_lengths_of_files_from_pipes(kind: str, at: int, unknown: bytes) -> None:
    whole = encoded(noise(10.0), kind)
    assert len(read_samples(whole[:at] + unknown + whole[at + len(unknown) :])) == 160_000


def test_an_aiff_from_a_pipe() -> None:
    """sox counts 2 GiB of samples."""
    whole = bytearray(encoded(noise(10.0), "AIFF"))
    at = whole.index(b"COMM") + 10
    whole[at : at + 4] = (0x7FFFF000 // 2).to_bytes(4, "big")
    assert len(read_samples(bytes(whole))) == 160_000
    whole[at : at + 4] = (320_000).to_bytes(4, "big")
    with pytest.raises(RequestError, match=r"ends early.*10\.0 of 20\.0 s"):
        read_samples(bytes(whole))


def test_less_than_a_second_may_be_missing() -> None:
    whole = wav(PCM)
    assert len(read_samples(whole[:-20_000])) == 150_000
    with pytest.raises(RequestError, match="ends early"):
        read_samples(whole[:-33_000])


def test_a_part_in_the_middle_that_cannot_be_decoded() -> None:
    """Frames of AAC whose bytes are others: the file is as long as it says."""
    whole = bytearray(media(noise(10.0)[::-1], "ipod", "aac"))
    start = whole.index(b"mdat") + 4 + 2000
    for size, is_reported in ((9000, True), (200, False)):
        damaged = whole.copy()
        damaged[start : start + size] = b"\xff" * size
        if not is_reported:
            assert len(read_samples(bytes(damaged))) > 155_000
            continue
        with pytest.raises(
            RequestError, match=r"the audio is damaged.*\d\.\d of \d+\.\d s cannot be decoded"
        ):
            read_samples(bytes(damaged))
        assert len(read_samples(bytes(damaged), allow_truncated=True)) < 150_000


@pytest.mark.grid(1)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_healthy_mp3s_are_read_completely(rate: int, mode: str) -> None:
    """With a count of their frames to the sample, without one to what an encoder adds."""
    for channels in (1, 2):
        samples = noise(2.0, rate, channels)
        seconds = len(read_samples(mp3(samples, rate, mode=mode))) / 16000
        assert seconds == pytest.approx(2.0, abs=1e-3)
        seconds = len(read_samples(mp3(samples, rate, counted=False, mode=mode))) / 16000
        assert 2.0 <= seconds < 2.25


@pytest.mark.parametrize("rate", RATES)
def test_an_mp3_of_so_few_bits_that_it_has_no_count(rate: int) -> None:
    data = encoded(noise(2.0, rate), "MP3", rate, bitrate_mode="CONSTANT", compression_level=0.99)
    assert not {b"Xing", b"Info", b"VBRI"} & {data[i : i + 4] for i in range(400)}
    assert 2.0 <= len(read_samples(data)) / 16000 < 2.25


@pytest.mark.stays("True-False", "False-True")
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("loud_first", [True, False])
def test_concatenated_mp3s(counted: bool, loud_first: bool) -> None:
    """Tags between them are left out; one that looks like frames may cost one."""
    samples = noise(20.0)[:: -1 if loud_first else 1]
    one = mp3(samples, counted=counted)
    for between in (b"", TAG + ID3, b"APETAGEX" + b"a word " * 100):
        joined = read_samples(ID3 + one + between + one + TAG)
        assert 39.9 <= len(joined) / 16000 < 40.4
        loudness = np.abs(joined[: 8 * 79_920]).reshape(8, -1).mean(1)
        np.testing.assert_allclose(loudness[:4], loudness[4:], rtol=0.1, atol=0.005)


@pytest.mark.parametrize(("rate", "channels"), [(24000, 1), (16000, 2), (44100, 2)])
def test_concatenated_mp3s_of_other_rates(rate: int, channels: int) -> None:
    """Each at its own rate."""
    other = mp3(noise(5.0, rate, channels), rate)
    first, second = read_samples(mp3(noise(5.0))), read_samples(other)
    joined = read_samples(mp3(noise(5.0)) + other)
    assert 10.0 <= len(joined) / 16000 < 10.3
    for part, alone in ((joined[: len(first)], first), (joined[-len(second) :], second)):
        loudness = np.abs(part[: 5 * 16000]).reshape(4, -1).mean(1)
        np.testing.assert_allclose(loudness, np.abs(alone).reshape(4, -1).mean(1), rtol=0.1, atol=0.01)


def test_a_mistaken_count_is_not_believed() -> None:
    """Some encoders count the first frame, too; more is another recording."""
    whole = bytearray(mp3(noise(20.0)))
    at = whole.index(b"Xing") + 8
    count = int.from_bytes(whole[at : at + 4], "big")
    for wrong, least in ((count + 1, 20.0), (count - 1, 19.9), (count // 2, 19.8)):
        whole[at : at + 4] = wrong.to_bytes(4, "big")
        assert least <= len(read_samples(bytes(whole))) / 16000 < 20.2
    whole[at : at + 4] = (2 * count).to_bytes(4, "big")
    with pytest.raises(RequestError, match=r"ends early.*20\.\d of 40\.\d s"):
        read_samples(bytes(whole))


def test_a_count_of_fraunhofers() -> None:
    frames = mp3(noise(20.0), counted=False)
    count = 20 * 16000 // 576 + 4
    head = frames[:2] + b"\x98" + frames[3:4] + bytes(32) + b"VBRI" + bytes(10)
    whole = head + count.to_bytes(4, "big") + bytes(360 - 54) + frames  # 80 kbit/s
    assert 20.0 <= len(read_samples(whole)) / 16000 < 20.2
    with pytest.raises(RequestError, match=r"ends early.*of 20\.\d s"):
        read_samples(whole[: len(whole) * 3 // 4])


def test_junk_after_a_recording_is_ignored() -> None:
    frame = b"\xff\xf3\x94\xc4" + bytes(1000)  # a header of MP3 alone
    for whole in (mp3(noise(5.0)), media(noise(5.0), "adts", "aac"), encoded(noise(5.0), "FLAC")):
        alone = read_samples(whole)
        for junk in (TAG, b"APETAGEX" + b"a word " * 100, *([frame] if whole[:2] == b"\xff\xf3" else [])):
            assert abs(len(read_samples(whole + junk)) - len(alone)) < 1200


@pytest.mark.parametrize(("kind", "subtype"), OGG)
def test_concatenated_ogg_files(kind: str, subtype: str) -> None:
    """As a radio station sends them. Of another kind they are refused."""
    one = encoded(noise(10.0), kind, subtype=subtype)
    joined = read_samples(one + one)
    assert 20.0 <= len(joined) / 16000 < 20.1
    assert np.abs(joined[16000 * 15 : 16000 * 19]).mean() > 0.1
    other = encoded(noise(3.0), *dict(OGG).keys(), subtype="OPUS" if subtype == "VORBIS" else "VORBIS")
    with pytest.raises(RequestError, match=r"several recordings.*one recording per file"):
        read_samples(one + other)
    with pytest.raises(RequestError, match="ends early"):
        read_samples(one[:-1])
    assert len(read_samples(one + TAG)) == 160_000


@pytest.mark.parametrize(("kind", "subtype"), OGG)
def test_an_ogg_file_of_whole_pages_whose_end_is_not_marked(kind: str, subtype: str) -> None:
    """A recorder that was stopped. One byte more or less and it was cut off."""
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
    for cut in (unmarked[:-1], unmarked + b"O", unmarked + b"OggS", whole[: last + 26]):
        with pytest.raises(RequestError, match="ends early"):
            read_samples(cut)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("seconds", [0.4, 1.0, 2.0, 3.3])
def test_vorbis_in_a_single_page_is_read_completely(rate: int, seconds: float) -> None:
    """FFmpeg cuts a block of it, or adds one."""
    wave = 0.5 * np.sin(np.arange(int(rate * seconds)) * 440 * 2 * np.pi / rate)
    data = encoded(wave, "OGG", rate, "VORBIS")
    assert data.count(b"OggS") <= 4, "head, setup, samples"
    assert len(read_samples(data)) == pytest.approx(seconds * 16000, abs=1)
    assert audio_seconds(data) == pytest.approx(seconds, abs=0.1)


def ogg_checksum(page: bytes | bytearray) -> bytes:
    """The long division itself, bit by bit."""
    value = int.from_bytes(page[:22] + bytes(4) + page[26:], "big") << 32
    while (over := value.bit_length() - 33) >= 0:
        value ^= 0x104C11DB7 << over
    return value.to_bytes(4, "little")


def test_nothing_of_another_recording_is_read() -> None:
    """Memory that a recording leaves is not that of the next, which promises more than it has."""
    loud = encoded(np.full((20 * 16000, 1), 0.75, np.float32), "WAV")
    whole = mp3(noise(20.0) * 0.1)
    cut = whole[: len(whole) // 2]
    found = []
    for _ in range(3):
        assert read_samples(loud).max() == 0.75
        found.append(read_samples(cut, allow_truncated=True))
    assert 16_000 < len(found[0]) < 19 * 16_000
    assert np.abs(found[0]).max() < 0.3
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("size", [6, 7])
def test_chunks_before_the_samples_may_have_an_odd_length(size: int) -> None:
    """A byte of padding follows then, which the length does not count."""
    data = wav(PCM)
    text = b"INFOabc"[:size]
    chunk = b"LIST" + size.to_bytes(4, "little") + text + bytes(size % 2)
    whole = data[:12] + chunk + data[12:]
    assert audio_seconds(whole) == pytest.approx(10.0)
    assert len(read_samples(whole)) == 160_000
    with pytest.raises(RequestError, match=r"ends early.*5\.\d of 10\.0 s"):
        read_samples(whole[: len(whole) // 2 + 8000])
