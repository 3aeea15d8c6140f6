"""Log-mel features are those of OpenAI's implementation, on clips and filters that it published."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.audio import log_mel as module
from ingot.audio.log_mel import RATE, WINDOW, fit, log_mel, mel_filters


def clip(path: Path) -> torch.Tensor:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        values = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return torch.from_numpy(values.astype(np.float32) / 32768)


@pytest.mark.parametrize("mels", [80, 128])
def test_filters_are_the_published_ones(mels: int, data: Path) -> None:
    published = np.load(data / "tokenizers" / "whisper" / "mel_filters.npz")[f"mel_{mels}"]
    torch.testing.assert_close(mel_filters(mels), torch.from_numpy(published), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("mels", "frames"), [(80, 200), (128, 60)])
@pytest.mark.parametrize("number", [0, 1])
def test_features_are_the_originals(number: int, mels: int, frames: int, golden: Path) -> None:
    folder = golden / "whisper"
    reported = json.loads((folder / "log_mel.json").read_text())[f"clip{number}"]
    found = log_mel(fit(clip(folder / reported["file"])), mels)
    assert [*found.shape] == reported[f"mel{mels}"]["shape"]
    first = np.load(folder / "log_mel.npz")[f"clip{number}_mel{mels}_first{frames}"]
    torch.testing.assert_close(found[:, :frames], torch.from_numpy(first).float(), rtol=0, atol=6e-4)
    for name in ("mean", "std", "min", "max"):
        value = float(getattr(found.double(), name)())
        assert value == pytest.approx(reported[f"mel{mels}"][name], abs=1e-5), name
    wanted = torch.tensor(reported[f"mel{mels}"]["per_mel_mean"])
    torch.testing.assert_close(found.mean(1), wanted, rtol=0, atol=1e-5)


def test_clips_are_scaled_separately() -> None:
    loud = torch.randn(2, 16000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e-3]])
    together = log_mel(loud, 80)
    assert together.shape == (2, 80, 100)
    for index in range(2):
        torch.testing.assert_close(together[index], log_mel(loud[index], 80))


def test_silence_and_length() -> None:
    assert torch.equal(log_mel(torch.zeros(WINDOW), 80), torch.full((80, 3000), -1.5))
    assert fit(torch.ones(3), 5).tolist() == [1, 1, 1, 0, 0]
    assert fit(torch.ones(2, 7), 5).shape == (2, 5)


@pytest.mark.parametrize("count", [16000, 32000 + 79, 50 * 160])
def test_blocks_are_as_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clips together, too, each with a loudest value of its own."""
    samples = torch.randn(2, count, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [0.5]])
    whole = log_mel(samples, 80)
    monkeypatch.setattr(module, "_PART", 50)
    torch.testing.assert_close(log_mel(samples, 80), whole, rtol=0, atol=1e-5)
    assert whole.shape == (2, 80, count // 160)
