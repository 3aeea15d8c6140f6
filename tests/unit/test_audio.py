"""Audio of every format, rate and number of channels becomes one channel at 16 kHz; bad files are named."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from ingot.errors import RequestError
from ingot.processors import audio
from ingot.processors.audio import audio_seconds, read_audio

SECONDS = 2.0


def tone(rate: int, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """[frames, channels]; the second channel is silent."""
    wave = 0.5 * np.sin(2 * math.pi * hertz * np.arange(int(SECONDS * rate)) / rate)
    silent = np.zeros_like(wave)
    return np.stack([wave, *[silent] * (channels - 1)], 1).astype(np.float32)


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (48000, 2), (44100, 1), (8000, 1)])
def test_a_tone_stays_a_tone(tmp_path: Path, kind: str, rate: int, channels: int) -> None:
    path = tmp_path / f"tone.{kind}"
    soundfile.write(path, tone(rate, channels), rate)
    samples = read_audio(path)
    assert samples.dtype == torch.float32
    slack = 2000 if kind == "mp3" else 2  # its encoder adds silence
    assert abs(len(samples) - SECONDS * 16000) <= slack
    middle = samples[8000:24000]
    assert float(middle.square().mean().sqrt()) == pytest.approx(0.5 / math.sqrt(2) / channels, rel=0.02)
    assert int(torch.fft.rfft(middle).abs().argmax()) == 440
    assert torch.equal(read_audio(path.read_bytes()), samples)


def test_blocks_are_resampled_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(1).normal(size=44100 * 3) * 0.1, 44100)
    whole = read_audio(tmp_path / "noise.wav")
    monkeypatch.setattr(audio, "_BLOCK_SECONDS", 1)
    torch.testing.assert_close(read_audio(tmp_path / "noise.wav"), whole, rtol=0, atol=1e-6)


def flac_of(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(
        file, np.random.default_rng(1).normal(size=int(seconds * 16000)) * 0.1, 16000, format="FLAC"
    )
    return file.getvalue()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.wav"
    text.write_text("These are notes, not a recording.\n" * 50)
    with pytest.raises(RequestError, match=r"no audio that can be read.*notes\.wav.*wav, flac"):
        read_audio(text)
    with pytest.raises(RequestError, match="no such audio file"):
        read_audio(tmp_path / "missing.wav")
    with pytest.raises(RequestError, match="no audio that can be read"):
        read_audio(b"")
    damaged = bytearray(flac_of(10.0))
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    with pytest.raises(RequestError, match=r"no audio that can be read.*lost sync"):
        read_audio(bytes(damaged))


def test_raw_samples_are_refused(tmp_path: Path) -> None:
    """soundfile goes by the suffix alone, and asks for a rate."""
    for path in (tmp_path / "a.raw", tmp_path / "a.RAW"):
        path.write_bytes(bytes(1000))
        with pytest.raises(RequestError, match=r"do not tell their rate.*a\.(raw|RAW).*wav, flac"):
            read_audio(path)
        assert audio_seconds(path) == 0


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such audio file.*to fix: another path"):
        read_audio(tmp_path)
    (tmp_path / "round.wav").symlink_to(tmp_path / "round.wav")
    with pytest.raises(RequestError, match=r"cannot be read \(Too many levels.*to fix: another path"):
        read_audio(tmp_path / "round.wav")


def test_a_flac_from_a_pipe_tells_no_length() -> None:
    data = bytearray(flac_of(2.0))
    assert data[4] & 0x7F == 0, "STREAMINFO"
    data[8 + 13] &= 0xF0  # 36 bits, the number of samples
    data[8 + 14 : 8 + 18] = bytes(4)
    with pytest.raises(RequestError, match=r"does not tell how long it is.*not into a pipe"):
        read_audio(bytes(data))
    assert audio_seconds(bytes(data)) == 0


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "whole.wav"
    soundfile.write(path, np.zeros(10 * 16_000, np.float32), 16_000)
    whole = path.read_bytes()
    path.write_bytes(whole[:100_000])
    for source in (path, whole[:100_000]):
        with pytest.raises(RequestError, match="ends early"):
            read_audio(source)
    for unknown in (0, 0xFFFFFFFF, 0x7FFFFFFF):  # written into a pipe
        assert len(read_audio(whole[:4] + unknown.to_bytes(4, "little") + whole[8:])) == 160_000
    assert len(read_audio(whole[:-20_000])) == 150_000, "less than a second"


def test_bounds_are_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of hours of silence is not decoded."""
    path = tmp_path / "silence.flac"
    with soundfile.SoundFile(path, "w", 8000, 8, format="FLAC") as file:
        for _ in range(4):  # 15 minutes each
            file.write(np.zeros((8000 * 900, 8), np.int16))
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *given: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=r"too long.*3600 s.*at most 1800 s"):
        read_audio(path, max_seconds=1800)
    monkeypatch.setattr(audio, "MOST_CHANNELS", 2)
    with pytest.raises(RequestError, match="too many channels"):
        read_audio(path)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "nan.wav", np.full(16000, math.nan, np.float32), 16000, subtype="FLOAT")
    with pytest.raises(RequestError, match="no numbers"):
        read_audio(tmp_path / "nan.wav")


def test_a_clip_that_others_published(data: Path) -> None:
    samples = read_audio(data / "audio" / "jfk.flac")
    assert len(samples) / 16000 == pytest.approx(11.0, abs=0.01)
    assert 0.1 < float(samples.abs().max()) <= 1
