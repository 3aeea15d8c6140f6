"""A speech encoder's convolutions as products of overlapping rows: what takes them, and against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ingot import LLM
from ingot.kernels.product import prompt_gate_up
from ingot.layers.encoder_blocks.convolution import FrameConvolution, gelu_convolutions, takes_convolutions
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.models import whisper
from tests.encoders.speech import FRAMES, MELS, write_speech
from tests.kernels.numerics import normal
from tests.kernels.test_packed_matmul import HALF_DTYPES

Pair = tuple[FrameConvolution, FrameConvolution]


def pair(dtype: torch.dtype, device: str = "cpu", mels: int = 16, size: int = 256) -> Pair:
    """With biases as large as the sums are."""
    found = FrameConvolution(mels, size, 1, dtype), FrameConvolution(size, size, 2, dtype)
    for place, conv in enumerate(found):
        conv.weight.data = normal(*conv.weight.shape, dtype=dtype, seed=place) / (3 * conv.in_channels) ** 0.5
        conv.bias.data = normal(size, dtype=dtype, seed=place + 2)  # type: ignore[union-attr]
    return found[0].to(device), found[1].to(device)


def exactly(convolutions: Pair, x: torch.Tensor) -> torch.Tensor:
    """By PyTorch's convolutions, in float64."""
    x = x.double()
    for conv in convolutions:
        assert conv.bias is not None
        weights = conv.weight.double(), conv.bias.double()
        x = torch.nn.functional.conv1d(x, *weights, stride=conv.stride, padding=1)
        x = x * (1 + torch.erf(x / 2**0.5)) / 2
    return x.transpose(1, 2)


def check(convolutions: Pair, x: torch.Tensor, most: float) -> None:
    with torch.inference_mode():
        found, true = gelu_convolutions(*convolutions, x), exactly(convolutions, x)
    assert found.shape == true.shape
    assert found.dtype == x.dtype
    assert ((found.double() - true).norm() / true.norm()) < most * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_windows_do_not_mix(dtype: torch.dtype) -> None:
    for windows, frames in ((1, 2), (1, 10), (3, 20)):
        check(pair(dtype), normal(windows, 16, frames, dtype=dtype), 2)


def test_what_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows, whole tiles of outputs, rows that a descriptor reads."""
    convolutions, windows = pair(torch.float16), torch.zeros(2, 16, 30).half()
    assert not takes_convolutions(*convolutions, windows)  # no GPU
    monkeypatch.setattr(prompt_gate_up, "is_hopper", lambda device: True)
    assert takes_convolutions(*convolutions, windows)
    assert not takes_convolutions(*convolutions, windows[:1])
    assert not takes_convolutions(*convolutions, windows[..., :29])
    assert not takes_convolutions(*pair(torch.float32), windows.float())
    assert not takes_convolutions(*pair(torch.float16, mels=12), windows)
    assert not takes_convolutions(*pair(torch.float16, size=384), windows)  # tiny


@pytest.mark.parametrize(("able", "fused", "called"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_a_whisper_takes_them(
    able: bool, fused: bool, called: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unless every module is called, or an observer sees what is between."""
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder, d_model=256)
    model = LLM(folder, "cpu").engine.model
    kernel, given = mock.Mock(side_effect=gelu_convolutions), torch.randn(2, MELS, FRAMES)
    forward_pass = EncoderPass(fused=True) if fused else MODULE_BY_MODULE
    with (
        torch.inference_mode(),
        mock.patch.multiple(whisper, takes_convolutions=lambda *a: able, gelu_convolutions=kernel),
    ):
        found = model.encode(given, forward_pass)
        assert kernel.call_count == called
        seen = model.encode(given, EncoderPass(fused=fused, observer=lambda *one: None))
        assert kernel.call_count == called
    torch.testing.assert_close(found, seen, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.usefixtures("poisoned_allocations")
def test_on_hopper(dtype: torch.dtype) -> None:
    for windows, mels, size in ((2, 80, 768), (8, 128, 1280)):
        convolutions = pair(dtype, "cuda", mels, size)
        x = normal(windows, mels, 3000, dtype=dtype, device="cuda")
        assert takes_convolutions(*convolutions, x)
        check(convolutions, x, 2)
