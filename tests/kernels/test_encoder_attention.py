"""Attention of an encoder's positions to all of their input: what the kernel takes, and against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ingot.config.encoder_config import StackConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import IngotError
from ingot.kernels.attention import encoder_attention as module
from ingot.kernels.attention.encoder_attention import encoder_attention, takes_windows
from ingot.layers.build_context import BuildContext
from ingot.layers.encoder_blocks import encoder as layers
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from tests.encoders.test_added_in_place import stack
from tests.kernels.numerics import normal
from tests.kernels.test_packed_matmul import HALF_DTYPES


def check(joined: torch.Tensor, inputs: int, heads: int, most: float) -> torch.Tensor:
    """Against float64, an input and a head at a time: within ``most`` times the dtype's last bit of the
    largest value.
    """
    out = encoder_attention(joined, inputs, heads)
    width = joined.shape[1] // 3 // heads
    positions = len(joined) // inputs
    assert out.shape == (len(joined), heads * width)
    assert out.dtype == joined.dtype
    limit = most * torch.finfo(joined.dtype).eps
    for one in range(inputs):
        rows = slice(one * positions, (one + 1) * positions)
        parts = joined[rows].double().unflatten(1, (3, heads, width))
        for head in range(heads):
            query, keys, values = parts[:, :, head].unbind(1)
            scores = query @ keys.t() / width**0.5
            shares = (scores - scores.amax(1, keepdim=True)).exp()
            true = shares @ values / shares.sum(1, keepdim=True)
            found = out[rows, head * width : (head + 1) * width].double()
            assert (found - true).abs().max() <= limit * values.abs().max()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_the_reference_is_the_formula(dtype: torch.dtype) -> None:
    joined = normal(3 * 17, 3 * 2 * 24, dtype=dtype)
    check(joined, 3, 2, 4)
    assert encoder_attention(joined[:0], 3, 2).shape == (0, 48)


def test_what_is_no_window() -> None:
    with pytest.raises(IngotError, match="rows are not whole inputs"):
        encoder_attention(torch.ones(10, 96), 3, 2)
    with pytest.raises(IngotError, match="no queries, keys and values"):
        encoder_attention(torch.ones(9, 100), 3, 2)
    with pytest.raises(IngotError, match="inputs is out of range"):
        encoder_attention(torch.ones(9, 96), 0, 2)


def takes(positions: int, inputs: int = 8, heads: int = 20, dtype: torch.dtype = torch.float16) -> bool:
    joined = torch.empty(inputs * positions, 192 * heads, dtype=dtype, device="meta")
    return takes_windows(joined, inputs, heads)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 channels in 16 bits, of inputs with many positions, which descriptors can read."""
    assert not takes(1500)  # no GPU
    monkeypatch.setattr(module, "on_hopper", lambda device, head_dim, itemsize: itemsize == 2)
    assert takes(1500)
    assert takes(1500, dtype=torch.bfloat16)
    assert not takes(1500, dtype=torch.float32)
    assert not takes(module.LEAST_POSITIONS - 1)
    assert takes(module.LEAST_POSITIONS)
    rows = torch.empty(3000, 3844, dtype=torch.float16, device="meta")
    assert takes_windows(rows[:, :3840].contiguous(), 2, 20)
    assert not takes_windows(rows[:, :3840], 2, 20)  # rows begin at multiples of 8 bytes
    assert not takes_windows(rows[:, :3840].contiguous(), 2, 30)  # heads of 128 bytes, but not of 64 channels


@pytest.mark.parametrize(
    ("inputs", "heads", "groups"), [(8, 20, 3), (8, 12, 3), (1, 20, 2), (1, 12, 3), (1, 16, 3), (2, 20, 3)]
)
def test_few_items_are_shared_out_evenly(inputs: int, heads: int, groups: int) -> None:
    """As they were faster on an H200, with 132 multiprocessors."""
    assert module._groups(inputs, heads, 1500, 132) == groups


@pytest.mark.parametrize(("able", "fused", "called"), [(True, True, 3), (False, True, 0), (True, False, 0)])
def test_layers_take_it(able: bool, fused: bool, called: int) -> None:
    """In both ways through a layer, unless every module is called."""
    kernel = mock.Mock(side_effect=encoder_attention)
    forward_pass = EncoderPass(fused=True) if fused else MODULE_BY_MODULE
    encoder = stack(torch.float16)
    hidden = normal(90, 64, dtype=torch.float16)
    with mock.patch.multiple(layers, takes_windows=lambda *given: able, encoder_attention=kernel):
        encoder(hidden.clone(), 3, forward_pass)
        assert kernel.call_count == called
        seen = EncoderPass(fused=fused, observer=lambda *one: None)
        encoder(hidden.clone(), 3, seen)
        assert kernel.call_count == 2 * called


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
class TestOnHopper:
    """What only such a GPU shows."""

    @pytest.mark.parametrize("dtype", HALF_DTYPES)
    @pytest.mark.usefixtures("poisoned_allocations")
    def test_against_float64(self, dtype: torch.dtype) -> None:
        """Windows, few and many programs, tiles that end at an input's end and before; the same bits again,
        and alone.
        """
        for inputs, heads, positions in ((1, 1, 1500), (8, 20, 1500), (3, 2, 1536), (2, 3, 257), (2, 1, 640)):
            joined = normal(inputs * positions, 192 * heads, dtype=dtype, device="cuda") * 1.5
            assert takes_windows(joined, inputs, heads)
            out = check(joined, inputs, heads, 4)
            assert torch.equal(out, encoder_attention(joined, inputs, heads))
            last = joined[-positions:]
            assert torch.equal(out[-positions:], encoder_attention(last.clone(), 1, heads))

    def test_large_scores(self) -> None:
        """A query's weights are those of a few keys, and fade as larger scores come."""
        joined = normal(2 * 1500, 192 * 2, dtype=torch.float16, device="cuda") * 6
        check(joined, 2, 2, 8)

    def test_other_inputs_do_not_matter(self) -> None:
        """Not even if they are infinite or no numbers: tiles end with an input."""
        joined = normal(3 * 1500, 192 * 2, dtype=torch.float16, device="cuda")
        before = encoder_attention(joined, 3, 2)
        joined[:1500] = torch.inf
        joined[3000:] = torch.nan
        assert torch.equal(encoder_attention(joined, 3, 2)[1500:3000], before[1500:3000])

    def test_attention_takes_it(self) -> None:
        """Without it every module is called, and there attention is the library's."""
        context = BuildContext(QuantConfig(), KernelPlan(), torch.float16)
        attention = layers.BidirectionalAttention(
            StackConfig(128, 256, 1, num_heads=2, norm_eps=1e-5), context
        )
        joined = normal(600, 384, dtype=torch.float16, device="cuda")
        fused, modules = (
            attention.attend(joined, 2, way) for way in (EncoderPass(fused=True), MODULE_BY_MODULE)
        )
        assert not torch.equal(fused, modules)
        assert (fused - modules).abs().max() < 0.01
