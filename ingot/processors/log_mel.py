"""Log-mel features of speech, as Whisper takes them.

Owns the mel filters and the arithmetic from samples to features, on whatever device the samples are. Knows no
files and no model.
Source: Slaney's Auditory Toolbox for the scale and its area normalisation; OpenAI's Whisper for the rest.

    LongLogMel(samples, 80, device).window(3000, 6000)    # of hours, a part at a time
    features = log_mel(samples, mels=80)        # [samples] in -1 to 1 at 16 kHz → [80, samples / 160]
"""

from __future__ import annotations

import functools
import math

import torch

RATE = 16_000  # samples per second
HOP = 160  # samples from frame to frame
WINDOW_SECONDS = 30
WINDOW = WINDOW_SECONDS * RATE  # samples
_FFT = 400
_LINEAR_HZ = 1000.0  # below, mels are linear in Hz
_MELS_AT = 15.0  # at that frequency
_STEP = math.log(6.4) / 27  # of a mel above it, in log Hz
_PART = 6000  # frames, a minute
_LEAST = 1e-10  # of a power, before the logarithm
_RANGE = 8.0  # below the loudest value, in powers of ten


def log_mel(samples: torch.Tensor, mels: int) -> torch.Tensor:
    """Features of each clip: float32 [..., mels, samples // 160].

    Args:
        samples: [..., N] in -1 to 1 at 16 kHz, N at least 201. Each clip is scaled by its own loudest value,
            so silence that is appended belongs to it.
        mels: 80 or 128 in published models.
    """
    shape = samples.shape[:-1]
    rows = samples.float().reshape(-1, samples.shape[-1])
    logs = _logs(torch.nn.functional.pad(rows, (_FFT // 2, _FFT // 2), "reflect"), mels)[..., :-1]
    return _scaled(logs, logs.amax((-2, -1), keepdim=True)).reshape(*shape, mels, -1)


class LongLogMel:
    """``log_mel`` of a recording and a window of silence behind it, a part at a time: samples stay where they
    are, and of features there is never more than a minute.

    Args:
        samples: [N] in -1 to 1 at 16 kHz.
        device: where features are computed.
    """

    def __init__(self, samples: torch.Tensor, mels: int, device: torch.device) -> None:
        self._samples, self._mels, self._device = samples, mels, device
        self.num_frames, self.seconds = len(samples) // HOP, len(samples) / RATE
        sounding = self.num_frames + 3  # behind them a frame has no sample of the recording
        self._first = self._part(0, min(_PART, sounding))
        loudest = [float(self._first.max())]
        loudest += [
            float(self._part(start, min(start + _PART, sounding)).max())
            for start in range(_PART, sounding, _PART)
        ]
        self._loudest = torch.tensor(max(loudest), device=device)

    def window(self, start: int, end: int) -> torch.Tensor:
        """Frames [start, end): float32 [mels, end - start] on the device."""
        known = end <= self._first.shape[1]
        logs = self._first[:, start:end] if known else self._part(start, end)
        return _scaled(logs, self._loudest)

    def _part(self, start: int, end: int) -> torch.Tensor:
        """Logarithms of frames [start, end)."""
        first, last = start * HOP - _FFT // 2, (end - 1) * HOP + _FFT // 2
        samples = self._samples[max(first, 0) : last].to(self._device).float()
        samples = fit(samples, last - max(first, 0))
        if first < 0:  # only the first frame begins before the recording
            samples = torch.cat([samples[1 : 1 - first].flip(0), samples])
        return _logs(samples[None], self._mels)[0]


def _logs(padded: torch.Tensor, mels: int) -> torch.Tensor:
    """Logarithms of powers, [B, mels, frames] of samples [B, N] with half a frame more on both sides."""
    window = torch.hann_window(_FFT, device=padded.device)
    spectrum = torch.stft(padded, _FFT, HOP, window=window, center=False, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    return (_filters_on(mels, padded.device) @ power).clamp(min=_LEAST).log10()


def _scaled(logs: torch.Tensor, loudest: torch.Tensor) -> torch.Tensor:
    return (torch.maximum(logs, loudest - _RANGE) + 4) / 4


def fit(samples: torch.Tensor, length: int = WINDOW) -> torch.Tensor:
    """Samples [..., N], cut or followed by silence: [..., length]."""
    missing = length - samples.shape[-1]
    return samples[..., :length] if missing <= 0 else torch.nn.functional.pad(samples, (0, missing))


@functools.cache
def mel_filters(mels: int) -> torch.Tensor:
    """Triangles of equal area, evenly spaced in mels up to half the sampling rate: float32 [mels, 201]."""
    nyquist = RATE / 2
    edges = _hertz(torch.linspace(0, _mels(nyquist), mels + 2, dtype=torch.float64))
    bins = torch.linspace(0, nyquist, _FFT // 2 + 1, dtype=torch.float64)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    height = (2 / (edges[2:] - edges[:-2]))[:, None]
    return (torch.minimum(rising, falling).clamp(min=0) * height).float()


@functools.cache
def _filters_on(mels: int, device: torch.device) -> torch.Tensor:
    return mel_filters(mels).to(device)


def _mels(hertz: float) -> float:
    """Of a frequency above the linear ones."""
    return _MELS_AT + math.log(hertz / _LINEAR_HZ) / _STEP


def _hertz(mels: torch.Tensor) -> torch.Tensor:
    above = _LINEAR_HZ * ((mels - _MELS_AT) * _STEP).exp()
    return torch.where(mels < _MELS_AT, mels * (_LINEAR_HZ / _MELS_AT), above)
