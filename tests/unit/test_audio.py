"""Audio of every format, rate and number of channels becomes one channel at 16 kHz; bad files are named."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch

from ingot.audio import audio_file
from ingot.audio.recording_samples import (
    SUFFIXES,
    audio_seconds,
    mixed,
    read_audio,
    read_samples,
    samples_of_array,
)
from ingot.errors import RequestError
from tests.audio_files import media, silent_film, wav

SECONDS = 2.0
NOISE = (np.random.default_rng(1).normal(size=32_000) * 0.1).astype(np.float32)
# container, codec, and what tells its file from another of the same
MEDIA = {
    "m4a": ("ipod", "aac", {}),
    "alac": ("ipod", "alac", {}),
    "mp4": ("mp4", "aac", {}),
    "fragments": ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov"}),
    "mov": ("mov", "pcm_s16le", {}),
    "webm": ("webm", "libopus", {}),
    "browser": ("webm", "libopus", {"live": "1"}),
    "mka": ("matroska", "flac", {}),
    "aac": ("adts", "aac", {}),
    "mp3": ("mp3", "mp3", {}),
    "uncounted mp3": ("mp3", "mp3", {"write_xing": "0"}),
    "opus": ("ogg", "libopus", {}),
    "flac in ogg": ("ogg", "flac", {}),
    "caller": ("3gp", "aac", {}),
}


def tone(rate: int, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """[frames, channels]; the second channel is silent."""
    wave = 0.5 * np.sin(2 * math.pi * hertz * np.arange(int(SECONDS * rate)) / rate)
    silent = np.zeros_like(wave)
    return np.stack([wave, *[silent] * (channels - 1)], 1).astype(np.float32)


def encoded(samples: np.ndarray, kind: str, rate: int, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def check_tone(samples: torch.Tensor, channels: int, slack: int, volume: float = 1.0) -> None:
    assert samples.dtype == torch.float32
    assert abs(len(samples) - SECONDS * 16000) <= slack
    middle = samples[8000:24000]
    assert float(middle.square().mean().sqrt()) == pytest.approx(
        volume * 0.5 / math.sqrt(2) / channels, rel=0.02
    )
    assert int(torch.fft.rfft(middle).abs().argmax()) == 440


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (48000, 2), (44100, 1), (8000, 1)])
def test_a_tone_stays_a_tone(tmp_path: Path, kind: str, rate: int, channels: int) -> None:
    path = tmp_path / f"tone.{kind}"
    soundfile.write(path, tone(rate, channels), rate)
    samples = read_audio(path)
    check_tone(samples, channels, 0)
    assert torch.equal(read_audio(path.read_bytes()), samples)


@pytest.mark.grid(1)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", MEDIA)
def test_what_phones_and_browsers_write(kind: str, channels: int) -> None:
    """The encoder's padding is cut where the file says how long it is; elsewhere it may be a frame."""
    container, codec, options = MEDIA[kind]
    data = media(tone(48000, channels), container, codec, 48000, options=options)
    padded = {"fragments": 2048, "browser": 1400, "webm": 1400, "aac": 2048, "uncounted mp3": 2400}
    slack, volume = padded.get(kind, 1152 if kind == "mp3" else 0) // 3, 0.95 if "mp3" in kind else 1.0
    check_tone(read_audio(data), channels, slack, volume)  # LAME makes it quieter
    assert audio_seconds(data) == pytest.approx(SECONDS, abs=0.06)


@pytest.mark.parametrize("container", ["mp4", "matroska", "mov"])
def test_the_sound_of_a_video_is_read(container: str) -> None:
    """Also where it ends before the pictures do."""
    data = media(tone(48000), container, "aac", 48000, video=True)
    check_tone(read_audio(data), 1, 0 if container != "matroska" else 1024)
    with pytest.raises(RequestError, match=r"the file has no audio track.*video.*a file with sound"):
        read_audio(silent_film(container))
    assert audio_seconds(silent_film(container)) == 0


EXACT = [
    *[("WAV", one) for one in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")],
    *[("AIFF", one) for one in ("PCM_S8", "PCM_16", "PCM_24", "FLOAT")],
    *[("FLAC", one) for one in ("PCM_S8", "PCM_16", "PCM_24")],
    *[("WAVEX", "PCM_24"), ("RF64", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")],
]


@pytest.mark.grid(1)
@pytest.mark.parametrize(("kind", "subtype"), EXACT)
@pytest.mark.parametrize(("rate", "seconds"), [(16000, 2.0), (16000, 0.3), (44100, 1.1)])
def test_samples_are_those_of_libsndfile(kind: str, subtype: str, rate: int, seconds: float) -> None:
    """To the last one: what an encoder adds at either end is not there."""
    sound = np.random.default_rng(1).normal(size=(int(seconds * rate), 2)) * 0.1
    data = encoded(sound, kind, rate, subtype)
    wanted = soundfile.read(io.BytesIO(data), dtype="float32")[0].mean(1)
    wanted = wanted if rate == 16000 else soxr.resample(wanted, rate, 16000)
    np.testing.assert_allclose(read_samples(data), wanted, rtol=0, atol=5e-6)


def test_blocks_are_resampled_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = media(np.random.default_rng(1).normal(size=44100) * 0.1, "ipod", "aac", 44100)
    whole = read_audio(data)
    assert len(whole) == 16_000
    for values in (1, 1500, 44100 - 700):
        monkeypatch.setattr(audio_file, "_BLOCK", values)
        torch.testing.assert_close(read_audio(data), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["m4a", "webm", "mp3", "flac in ogg"])
def test_joined_frames_have_the_samples_of_single_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container, codec, options = MEDIA[kind]
    sound = np.random.default_rng(2).normal(size=(48000, 2)) * 0.1
    data = media(sound, container, codec, 48000, options=options)
    joined = read_samples(data)
    monkeypatch.setattr(audio_file, "_JOINED", 1)
    np.testing.assert_array_equal(read_samples(data), joined)
    assert len(joined) == pytest.approx(16_000, abs=1200)


def test_frames_are_joined_only_with_their_own_kind() -> None:
    """MP3 may go from one channel to two, which FFmpeg reads on."""
    parts = [np.random.default_rng(3).normal(size=(48000, count)) * 0.1 for count in (1, 2)]
    data = b"".join(encoded(part, "MP3", 48000) for part in parts)
    alone = [read_samples(encoded(part, "MP3", 48000)) for part in parts]
    found = read_samples(data)
    assert len(found) == pytest.approx(32_000, abs=2000)
    assert abs(np.square(found).sum() / sum(np.square(one).sum() for one in alone) - 1) < 0.1


@pytest.mark.parametrize("channels", [1, 2, 3, 6])
@pytest.mark.parametrize("interleaved", [True, False])
def test_channels_are_averaged(channels: int, interleaved: bool) -> None:
    values = np.random.default_rng(4).normal(size=(channels, 5000)).astype(np.float32)
    given = np.ascontiguousarray(values.T).T if interleaved else values
    found = mixed(given)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values.astype(np.float64).mean(0), rtol=0, atol=1e-6)
    if channels <= 2:
        np.testing.assert_array_equal(found, values.mean(0))


def flac_of(seconds: float) -> bytes:
    return encoded(np.random.default_rng(1).normal(size=int(seconds * 16000)) * 0.1, "FLAC", 16000)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.wav"
    text.write_text("These are notes, not a recording.\n" * 50)
    with pytest.raises(RequestError, match=r"no audio that can be read.*notes\.wav.*wav, aiff, flac"):
        read_audio(text)
    with pytest.raises(RequestError, match="no such audio file"):
        read_audio(tmp_path / "missing.wav")
    for junk in (b"x", bytes(1000), np.random.default_rng(1).bytes(100_000)):
        with pytest.raises(RequestError, match="no audio that can be read"):
            read_audio(junk)
    damaged = bytearray(flac_of(10.0))
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    with pytest.raises(RequestError, match=r"ends early.*\d\.\d of 10\.0 s.*allow_truncated"):
        read_audio(bytes(damaged))


@pytest.mark.parametrize("kind", ["W64", "AU", "VOC", "CAF", "RAW"])
def test_kinds_that_are_not_read(kind: str) -> None:
    with pytest.raises(RequestError, match=r"no audio that can be read.*wav, aiff, flac.*convert the file"):
        read_samples(encoded(NOISE, kind, 16000, "PCM_16"))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF"])
def test_an_empty_recording_is_an_error(kind: str) -> None:
    with pytest.raises(RequestError, match="the recording is empty"):
        read_audio(encoded(NOISE[:0], kind, 16000))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such audio file.*to fix: another path"):
        read_audio(tmp_path)
    (tmp_path / "round.wav").symlink_to(tmp_path / "round.wav")
    with pytest.raises(RequestError, match=r"cannot be read \(Too many levels.*to fix: another path"):
        read_audio(tmp_path / "round.wav")


def test_everything_that_is_a_file(tmp_path: Path) -> None:
    """Whatever the type; a name says nothing about the content."""
    path = tmp_path / "clip.mp3"
    path.write_bytes(encoded(NOISE, "WAV", 16000))
    wanted, data = read_samples(path), path.read_bytes()
    sources: list[Any] = [str(path), data, bytearray(data), memoryview(data), io.BytesIO(data)]
    for source in (*sources, path.open("rb"), path.open("rb", buffering=0)):
        np.testing.assert_array_equal(read_samples(source), wanted)
        if not isinstance(source, io.IOBase):
            assert audio_seconds(source) == 2.0
        else:
            source.close()


@pytest.mark.parametrize("source", [None, 7, 1.5, {"a": 1}, io.StringIO("words"), ["a.wav"]])
def test_invalid_sources(source: Any) -> None:
    with pytest.raises(
        RequestError, match=r"this is no recording.*a path, a file's bytes, or a file that is open"
    ):
        read_samples(source)


def test_a_file_that_was_read_already() -> None:
    with pytest.raises(RequestError, match=r"the recording is empty.*0 bytes"):
        read_samples(io.BytesIO(b""))


@pytest.mark.parametrize(
    ("dtype", "scale", "zero"),
    [("int16", 32768, 0), ("int32", 2**31, 0), ("uint8", 128, 128), ("float64", 1, 0), ("float16", 1, 0)],
)
def test_arrays_are_scaled_by_their_type(dtype: str, scale: float, zero: int) -> None:
    wanted = np.asarray([-1.0, -0.5, 0.0, 0.25, 0.75])
    found = samples_of_array((wanted * scale + zero).astype(dtype))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted.astype(np.float32))
    assert found.flags.writeable
    backwards = (wanted * scale + zero).astype(dtype)[::-1]
    backwards.flags.writeable = False
    assert samples_of_array(backwards).flags.writeable
    assert samples_of_array(backwards).strides == (4,)
    big = (wanted * scale + zero).astype(dtype)
    np.testing.assert_array_equal(samples_of_array(big.astype(big.dtype.newbyteorder(">"))), found)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint16", "bool", "complex64", "U3"])
def test_arrays_of_no_known_scale(dtype: str) -> None:
    with pytest.raises(RequestError, match=rf"no known scale.*{dtype[:2]}.*uint8, int16, int32, floats"):
        samples_of_array(np.zeros(100).astype(dtype))


@pytest.mark.parametrize("shape", [(100, 1), (1, 100), ()])
def test_arrays_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"numbers \[N\], one channel at 16 kHz"):
        samples_of_array(np.zeros(shape))


def test_samples_that_are_out_of_range(tmp_path: Path) -> None:
    """16 bits as floats. A recorder's floats may be over full scale."""
    for loud in (NOISE * 32767, NOISE.astype(np.float64) * 1e5, -np.abs(NOISE) * 32767):
        with pytest.raises(RequestError, match=r"samples are out of range.*allowed: -1 to 1.*32768"):
            samples_of_array(loud)
    np.testing.assert_array_equal(samples_of_array(NOISE * 20), NOISE * 20)
    soundfile.write(tmp_path / "loud.wav", NOISE * 32767, 16000, subtype="FLOAT")
    with pytest.raises(RequestError, match=r"out of range.*loud\.wav"):
        read_audio(tmp_path / "loud.wav")
    for value in (math.nan, math.inf, -math.inf):
        bad = np.concatenate([NOISE[:100], [value], NOISE[:100]])
        with pytest.raises(RequestError, match="no numbers"):
            samples_of_array(bad)
        soundfile.write(tmp_path / "nan.wav", bad, 16000, subtype="FLOAT")
        with pytest.raises(RequestError, match="no numbers"):
            read_audio(tmp_path / "nan.wav")


def test_bounds_are_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of hours of silence is not decoded."""
    path = tmp_path / "silence.flac"
    with soundfile.SoundFile(path, "w", 8000, 2, format="FLAC") as file:
        for _ in range(4):  # 15 minutes each
            file.write(np.zeros((8000 * 900, 2), np.int16))
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(audio_file.AudioFile, "blocks", lambda *given: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=r"too long.*3600 s.*at most 1800 s"):
        read_audio(path, max_seconds=1800)
    pcm = bytes(64_000)
    for data, what in (
        (wav(pcm, channels=17), "number of channels.*17.*1 to 16"),
        (wav(pcm, channels=300), "number of channels.*300"),
        (wav(pcm, channels=65535), "number of channels is out of range"),
        (wav(pcm, rate=1), "sampling rate is out of range.*: 1;"),
        (wav(pcm, rate=999), "sampling rate is out of range.*: 999;"),
        (wav(pcm, rate=2**31 - 1), "sampling rate is out of range.*2147483647"),
        (wav(pcm, rate=2**31), "no audio that can be read"),
        (wav(pcm, rate=0), "no audio that can be read"),
    ):
        with pytest.raises(RequestError, match=what):
            read_audio(data)


def test_a_length_missing_from_the_header_is_counted() -> None:
    """As it is decoded: days of silence in a few bytes end at the limit."""
    data = media(np.zeros(16000 * 120), "flac", "flac", piped=True)
    with pytest.raises(RequestError, match=r"too long.*at most 60 s"):
        read_samples(data, max_seconds=60)
    assert len(read_samples(data, max_seconds=121)) == 120 * 16000


def test_folders_take_every_suffix_that_is_written() -> None:
    assert {".wav", ".m4a", ".mp4", ".webm", ".mkv", ".aac", ".flac", ".mp3", ".ogg", ".opus", ".aiff"} <= {
        *SUFFIXES
    }


def test_a_clip_that_others_published(data: Path) -> None:
    samples = read_audio(data / "audio" / "jfk.flac")
    assert len(samples) / 16000 == pytest.approx(11.0, abs=0.01)
    assert 0.1 < float(samples.abs().max()) <= 1
