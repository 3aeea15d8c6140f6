"""Plans become features: utterances are placed, in a room, through a line and in noise.

Acoustics, on the model's device: gain, rooms (Gaussian noise under an exponential decay), band limits, white,
pink and brown noise, and babble of other utterances.

    rendered = Sound(samples, labels, device).render(Batch.of(plans), 480_000, generator)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.audio.log_mel import HOP as FRAME
from ingot.audio.log_mel import log_mel
from recipes.whisper.utterances import HOP, RATE
from recipes.whisper.windows import Batch

MELS = 80
_ROOM = 8000  # samples of a room's answer
_BLOCK = 8192  # lengths of transforms are multiples of it, so that they have small factors
_BABBLE_VOICES = 5


@dataclass(frozen=True)
class Rendered:
    """A batch: features [B, 80, frames] and phoneme labels [B, frames / 2]."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Acoustics:
    """How often and how much. ``clean``: share of windows that nothing is done to but their gain."""

    clean: float = 0.2
    room: float = 0.4
    band: float = 0.3
    noise: float = 0.7
    babble: float = 0.15
    least_snr: float = 5.0
    masks: float = 0.3


CLEAN = Acoustics(clean=1.0, masks=0.0)
NOISY = Acoustics(clean=0.0, masks=0.0, noise=1.0, least_snr=10.0)


class Sound:
    """All samples (int16 [steps, HOP]) and labels (uint8 [steps, 1]) on a device, by steps of 20 ms."""

    def __init__(self, samples: np.ndarray, labels: np.ndarray, device: torch.device) -> None:
        self.samples = torch.from_numpy(samples).to(device).view(-1, HOP)
        self.labels = torch.from_numpy(labels).to(device).view(-1, 1)
        self.device = device

    def render(
        self, batch: Batch, length: int, generator: torch.Generator, how: Acoustics | None = None
    ) -> Rendered:
        """Features of ``length`` samples each; ``generator`` is of the CPU and draws all that is random."""
        how, rows = how or Acoustics(), len(batch.ends)
        pieces, ends = batch.pieces.to(self.device), batch.ends.to(self.device)
        features = log_mel(self.waves(batch, length, generator, how), MELS)
        # Ingot and OpenAI end a recording with features of 0, Hugging Face with samples of 0: both are seen.
        zeroed = (torch.rand(rows, generator=generator) < 0.6).to(self.device)
        frames = torch.arange(features.shape[-1], device=self.device) < (ends // FRAME)[:, None]
        features = features * (frames | ~zeroed[:, None])[:, None]
        labels = self._placed(pieces, rows, length // HOP, self.labels)
        return Rendered(self._masked(features, generator, how.masks), labels)

    def waves(self, batch: Batch, length: int, generator: torch.Generator, how: Acoustics) -> Tensor:
        """Samples: float32 [B, length] in -1 to 1, silent behind each end."""
        pieces, ends = batch.pieces.to(self.device), batch.ends.to(self.device)
        wave = self._placed(pieces, len(ends), length // HOP, self.samples).float() / 32768
        inside = torch.arange(length, device=self.device) < ends[:, None]
        return self._acoustics(wave, generator, how) * inside

    def _placed(self, pieces: Tensor, rows: int, length: int, values: Tensor) -> Tensor:
        """Steps of all pieces [P, 4] at their places in rows of ``length`` steps: [rows, length * width]."""
        found = torch.zeros(rows * length, values.shape[1], dtype=values.dtype, device=self.device)
        sources, lengths, places = (column // HOP for column in pieces[:, :3].unbind(1))
        places = places + pieces[:, 3] * length
        before, total = lengths.cumsum(0) - lengths, int(lengths.sum())
        steps = torch.arange(total, device=self.device)
        repeat = torch.repeat_interleave
        into = steps + repeat(places - before, lengths, output_size=total)
        found[into] = values[steps + repeat(sources - before, lengths, output_size=total)]
        return found.view(rows, -1)

    def _acoustics(self, wave: Tensor, generator: torch.Generator, how: Acoustics) -> Tensor:
        rows, length = wave.shape
        dirty = self._share(rows, 1 - how.clean, generator)
        size = -(-(length + _ROOM) // _BLOCK) * _BLOCK
        answers = torch.fft.rfft(self._rooms(rows, generator, dirty, how), size)
        frequencies = torch.fft.rfftfreq(size, 1 / RATE).to(self.device)
        spectrum = torch.fft.rfft(wave, size) * answers
        wet = torch.fft.irfft(spectrum, size)[:, :length]
        noise = self._noise(rows, size, frequencies, generator)[:, :length]
        wet = self._mixed(wet, noise, self._share(rows, how.noise, generator) * dirty, generator, how)
        babble = self._babble(rows, length, generator)
        wet = self._mixed(wet, babble, self._share(rows, how.babble, generator) * dirty, generator, how)
        chosen = self._share(rows, how.band, generator) * dirty
        low, high = self._uniform(rows, 40, 300, generator), self._uniform(rows, 3200, 7800, generator)
        band = torch.sigmoid((frequencies - low) / 20) * torch.sigmoid((high - frequencies) / 100)
        band = torch.where(chosen > 0, band, torch.ones_like(band))
        wet = torch.fft.irfft(torch.fft.rfft(wet, size) * band, size)[:, :length]
        level = 10 ** (self._uniform(rows, -30, 3, generator) / 20)
        return (wet * level).clamp(-1, 1)

    def _rooms(self, rows: int, generator: torch.Generator, dirty: Tensor, how: Acoustics) -> Tensor:
        """[B, _ROOM]: 1 at 0, then noise that falls by 60 dB in 0.1 to 0.5 s, 6 to 20 dB below in all."""
        times = torch.arange(_ROOM, device=self.device) / RATE
        decay = torch.exp(-math.log(1000) * times / self._uniform(rows, 0.1, 0.5, generator))
        tail = self._normal(rows, _ROOM, generator) * decay * (times > 0.002)
        tail = tail / tail.square().sum(1, keepdim=True).sqrt()
        amount = 10 ** (-self._uniform(rows, 6, 20, generator) / 20)
        tail = tail * amount * self._share(rows, how.room, generator) * dirty
        tail[:, 0] = 1
        return tail

    def _noise(self, rows: int, size: int, frequencies: Tensor, generator: torch.Generator) -> Tensor:
        """White to brown: the power falls with the frequency to some power of 0 to 2."""
        slope = self._uniform(rows, 0, 1, generator)
        white = torch.fft.rfft(self._normal(rows, size, generator))
        return torch.fft.irfft(white * (frequencies.clamp(min=60) / 60) ** -slope, size)

    def _babble(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Several places of all samples at once."""
        steps = torch.arange(length // HOP, device=self.device)
        starts = torch.randint(len(self.samples), (rows, _BABBLE_VOICES), generator=generator).to(self.device)
        found = torch.zeros(rows, length, device=self.device)
        for voice in range(_BABBLE_VOICES):
            places = (starts[:, voice, None] + steps) % len(self.samples)
            found += self.samples[places].view(rows, length)
        return found / 32768

    def _mixed(
        self, wave: Tensor, noise: Tensor, chosen: Tensor, generator: torch.Generator, how: Acoustics
    ) -> Tensor:
        """Noise ``least_snr`` to 40 dB below the speech; where nobody speaks, at some level."""
        loud = (wave.square().mean(1, keepdim=True) * 2).sqrt()
        loud = torch.where(loud > 1e-4, loud, torch.full_like(loud, 0.05))
        ratio = 10 ** (-self._uniform(len(wave), how.least_snr, 40, generator) / 20)
        power = noise.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
        return wave + noise / power * loud * ratio * chosen

    def _masked(self, features: Tensor, generator: torch.Generator, share: float) -> Tensor:
        """Bands of up to 12 mels at the window's mean, in some windows."""
        rows = len(features)
        chosen = self._share(rows, share, generator) > 0
        first, width = self._uniform(rows, 0, MELS - 12, generator), self._uniform(rows, 0, 12, generator)
        mels = torch.arange(MELS, device=self.device)
        hidden = chosen & (mels >= first) & (mels < first + width)
        return torch.where(hidden[:, :, None], features.mean((1, 2), keepdim=True), features)

    def _share(self, rows: int, share: float, generator: torch.Generator) -> Tensor:
        """1 for a share of the rows, 0 for the others: [B, 1]."""
        return (torch.rand(rows, 1, generator=generator) < share).float().to(self.device)

    def _uniform(self, rows: int, low: float, high: float, generator: torch.Generator) -> Tensor:
        return (torch.rand(rows, 1, generator=generator) * (high - low) + low).to(self.device)

    def _normal(self, rows: int, size: int, generator: torch.Generator) -> Tensor:
        """Noise made on the device, from a seed that the generator draws."""
        own = torch.Generator(self.device)
        own.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        return torch.randn(rows, size, generator=own, device=self.device)
