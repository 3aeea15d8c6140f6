"""Log-mel features of speech, as Whisper takes them.

Source: Slaney's Auditory Toolbox for the scale and its area normalisation; OpenAI's Whisper for the rest.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ingot.audio.recording_samples import RATE
from ingot.errors import RequestError
from ingot.text.prompt import Input

HOP = 160  # samples from frame to frame
WINDOW_SECONDS = 30
WINDOW = WINDOW_SECONDS * RATE  # samples
_FFT = 400
_LINEAR_HZ = 1000.0  # below, mels are linear in Hz
_MELS_AT = 15.0  # at that frequency
_STEP = math.log(6.4) / 27  # log Hz per mel above it
_LEAST = 1e-10  # of a power, before the logarithm
_PART = 6000  # frames whose spectra are in memory at once: a minute, 10 MB
_AT_ONCE = 16 * WINDOW  # samples of several clips: each takes some 30 bytes
_RANGE = 8.0  # below the loudest value, in powers of ten


def log_mel(samples: torch.Tensor, mels: int) -> torch.Tensor:
    """Features of each clip: float32 [..., mels, samples // 160].

    Args:
        samples: [..., N] in -1 to 1 at 16 kHz, N at least 201. Each clip is scaled by its own loudest value,
            appended silence included.
        mels: 80 or 128 in published models.
    """
    clips = samples.reshape(-1, samples.shape[-1])
    frames, features = clips.shape[1] // HOP, []
    for part in clips.split(max(1, _AT_ONCE // clips.shape[1])):
        padded = torch.nn.functional.pad(part.float(), (_FFT // 2, _FFT // 2), mode="reflect")
        logs = torch.empty(len(part), mels, frames, device=part.device)
        for first in range(0, frames, _PART):
            last = min(first + _PART, frames)
            logs[..., first:last] = _logs(padded[:, first * HOP : (last - 1) * HOP + _FFT], mels)
        features.append(_scaled(logs, logs.amax((-2, -1), keepdim=True)))
    return torch.cat(features).reshape(*samples.shape[:-1], mels, -1)


class LongLogMel:
    """``log_mel`` of a recording and a window of silence after it, a part at a time: samples stay where they
    are, and there are never features of more than a minute.

    Args:
        samples: [N] in -1 to 1 at 16 kHz.
        device: that computes and holds features, ``beside`` other work.

    Raises:
        RequestError: the power of a sample overflows float32.
    """

    def __init__(self, samples: torch.Tensor, mels: int, device: torch.device) -> None:
        self._samples, self._mels, self._device = samples, mels, device
        self._name = os.urandom(16)
        self.num_frames, self.seconds = len(samples) // HOP, len(samples) / RATE
        sounding = self.num_frames + 3  # later frames have no sample of the recording
        with beside(device):
            self._first = self._part(0, min(_PART, sounding))
            loudest = [float(self._first.max())]
            loudest += [
                float(self._part(start, min(start + _PART, sounding)).max())
                for start in range(_PART, sounding, _PART)
            ]
            if not math.isfinite(max(loudest)):
                raise RequestError("samples are too loud to compute", allowed="-1 to 1", fix="the recording")
            self._loudest = torch.tensor(max(loudest), device=device)

    def window(self, start: int, end: int, frames: int | None = None) -> Input:
        """Frames [start, end), then zeros up to ``frames``: float32 [mels, frames] on the device."""
        with beside(self._device):
            known = end <= self._first.shape[1]
            logs = self._first[:, start:end] if known else self._part(start, end)
            features = fit(_scaled(logs, self._loudest), frames or end - start)
            return Input(features.contiguous(), self._name + struct.pack("<2q", start, end))

    def _part(self, start: int, end: int) -> torch.Tensor:
        """Logarithms of frames [start, end)."""
        first, last = start * HOP - _FFT // 2, (end - 1) * HOP + _FFT // 2
        samples = _sent(self._samples[max(first, 0) : last], self._device).float()
        samples = fit(samples, last - max(first, 0))
        if first < 0:  # only the first frame begins before the recording
            samples = torch.cat([samples[1 : 1 - first].flip(0), samples])
        return _logs(samples[None], self._mels)[0]


def _logs(samples: torch.Tensor, mels: int) -> torch.Tensor:
    """Logarithms of powers [B, mels, frames]; samples [B, N] begin and end with half a frame more."""
    window, filters = _constants(mels, samples.device)
    spectrum = torch.stft(samples, _FFT, HOP, window=window, center=False, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    return (filters @ power).clamp_(min=_LEAST).log10_()


def _scaled(logs: torch.Tensor, loudest: torch.Tensor) -> torch.Tensor:
    return torch.maximum(logs, loudest - _RANGE).add_(4).div_(4)


def features_by(device: torch.device, samples: torch.Tensor, mels: int) -> torch.Tensor:
    """``log_mel`` of samples on the CPU, computed on a device ``beside`` its other work."""
    with beside(device):
        return log_mel(_sent(samples, device), mels)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream that all features share, so that they and an engine's steps do not wait for each
    other. Everything is computed at its end; streams that read it must call ``Tensor.record_stream``.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def _sent(samples: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Samples on the device. NumPy copies them into pinned memory, since PyTorch would start all its threads
    in each calling thread, and the executor would wait for a core.
    """
    if device.type != "cuda":
        return samples.to(device)
    pinned = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), samples.numpy())
    return pinned.to(device, non_blocking=True)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """With high priority, so that these small kernels do not wait for an encoder's."""
    return torch.cuda.Stream(device, priority=-1)


def fit(samples: torch.Tensor, length: int = WINDOW) -> torch.Tensor:
    """Samples [..., N], cut or followed by silence: [..., length]."""
    missing = length - samples.shape[-1]
    return samples[..., :length] if missing <= 0 else torch.nn.functional.pad(samples, (0, missing))


@functools.cache
def mel_filters(mels: int) -> torch.Tensor:
    """Triangles of equal area, evenly spaced in mels up to half the sampling rate: float32 [mels, 201]."""
    nyquist = RATE / 2
    most_mels = _MELS_AT + math.log(nyquist / _LINEAR_HZ) / _STEP
    steps = torch.linspace(0, most_mels, mels + 2, dtype=torch.float64)
    above = _LINEAR_HZ * ((steps - _MELS_AT) * _STEP).exp()
    edges = torch.where(steps < _MELS_AT, steps * (_LINEAR_HZ / _MELS_AT), above)  # in Hz
    bins = torch.linspace(0, nyquist, _FFT // 2 + 1, dtype=torch.float64)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    height = (2 / (edges[2:] - edges[:-2]))[:, None]
    return (torch.minimum(rising, falling).clamp(min=0) * height).float()


@functools.cache
def _constants(mels: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The window of the Fourier transform, and the filters."""
    return torch.hann_window(_FFT, device=device), mel_filters(mels).to(device)
