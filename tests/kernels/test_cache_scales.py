"""The rule of a KV cache in 8 bits, against float64: all numbers of e4m3, ties, and what rounding costs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ingot.errors import DeviceError
from ingot.kernels.cache.cache_scales import E4M3, NARROW_CACHES, dequantize_heads, quantize_heads
from ingot.kernels.rows.int8_round import numbers_of, scale_of
from ingot.layers.forward_batch import LayerCache
from ingot.quant.plain_rows import rounded_heads
from tests.kernels.numerics import normal

EXPONENTS = range(-6, 9)
E4M3_NUMBERS = sorted(
    {0.0, *(n * 2.0**-9 for n in range(8)), *(2.0**e * (1 + n / 8) for e in EXPONENTS for n in range(8))}
    - {480.0}
)


def heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[48, 3, 64]: normal, each head of a size of its own."""
    return normal(48, 3, 64, dtype=torch.float32).mul(torch.logspace(-6, 3, 144).view(48, 3, 1)).to(dtype)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of e4m3 to each of float64 x, of two as near the one whose last bit is 0."""
    grid = torch.tensor([-n for n in E4M3_NUMBERS[:0:-1]] + E4M3_NUMBERS, dtype=torch.float64)
    odd = torch.tensor([n % 2 for n in [*range(len(E4M3_NUMBERS) - 1, 0, -1), *range(len(E4M3_NUMBERS))]])
    far = (x[..., None] - grid).abs()
    least = far.amin(-1, keepdim=True)
    return grid[torch.where(far == least, odd, 2).argmin(-1)]


def test_the_numbers_are_those_of_the_format() -> None:
    every = torch.arange(256).to(torch.uint8).view(E4M3).double()
    assert sorted(set(every[every.isfinite()].abs().tolist())) == E4M3_NUMBERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_e4m3_against_float64(dtype: torch.dtype) -> None:
    x = heads(dtype)
    numbers, scales = quantize_heads(x, E4M3)
    assert (numbers.dtype, scales.dtype, scales.shape) == (E4M3, torch.float32, x.shape[:-1])
    most = x.double().abs().amax(-1).clamp(min=1e-10)
    torch.testing.assert_close(scales.double(), most / 448, rtol=2e-7, atol=0.0)
    exact = x.double() / (most / 448)[..., None]
    # A last bit of fp32 decides between two numbers only where both are as near.
    off = (numbers.double() - exact).abs() - (nearest(exact) - exact).abs()
    assert (off <= 1e-6 * exact.abs()).all()
    assert (numbers.double().abs().amax(-1)[most > 1e-10] == 448).all()
    error = (dequantize_heads(numbers, scales, torch.float32).double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() * 2.0**-4, most[..., None] / 448 * 2.0**-10)
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_even_numbers(sign: float) -> None:
    lower = torch.tensor(E4M3_NUMBERS, dtype=torch.float64)
    middles = sign * (lower[1:] + lower[:-1]) / 2
    x = torch.cat([middles.float(), torch.tensor([448.0])])  # its scale is 1
    numbers, scales = quantize_heads(x, E4M3)
    assert float(scales) == 1.0
    assert torch.equal(numbers[:-1].double(), nearest(middles))
    assert torch.equal(rounded_heads(x.double(), "fp8")[:-1], nearest(middles))


def test_heads_of_zeros_and_of_the_largest_numbers() -> None:
    x = torch.stack([torch.zeros(8), torch.full((8,), 3e38), torch.full((8,), -1e-30)])
    numbers, scales = quantize_heads(x, E4M3)
    assert torch.equal(numbers.float(), torch.tensor([0.0, 448.0, 0.0])[:, None].expand(3, 8))
    assert (scales > 0).all()
    assert scales.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", NARROW_CACHES)
def test_references_have_the_same_rule(kind: str, dtype: torch.dtype) -> None:
    x = heads()
    means = dequantize_heads(*quantize_heads(x, NARROW_CACHES[kind]), torch.float32)
    plain = rounded_heads(x.to(dtype), kind)
    assert plain.dtype == dtype
    apart = (plain.double() - means.double()).abs() > 1e-5 * x.double().abs().amax(-1, keepdim=True)
    assert apart.double().mean() < 1e-3, "a closest call in float64 may be another in fp32"
    assert rounded_heads(x, "model") is x


@pytest.mark.parametrize("kind", NARROW_CACHES)
def test_a_flip_moves_one_value_of_a_head_by_a_step(kind: str) -> None:
    x = heads().double()
    near, other = rounded_heads(x, kind), rounded_heads(x, kind, flips=True)
    moved = near != other
    assert (moved.sum(-1) == 1).all()
    assert ((other - x).abs()[moved] >= (near - x).abs()[moved]).all()
    step = x.abs().amax(-1, keepdim=True) * (1 / 127 if kind == "int8" else 32 / 448)
    assert ((near - other).abs() <= step * (1 + 1e-9)).all()


@triton.jit
def round_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, s_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + places)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    scale, inverse = scale_of(tl.max(tl.abs(x), axis=0), dtype)
    tl.store(s_ptr + tl.program_id(0), scale)
    tl.store(y_ptr + places, numbers_of(x, inverse, dtype))


@pytest.mark.parametrize("kind", NARROW_CACHES.values())
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_have_the_same_rule(kind: torch.dtype, device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    ties = torch.tensor(E4M3_NUMBERS)
    ties = torch.cat([(ties[1:] + ties[:-1]) / 2, -ties[1:], torch.tensor([448.0, -3.1e-4])])[:256]
    x = torch.cat([heads().reshape(-1), torch.nn.functional.pad(ties, (0, 256 - len(ties)))]).view(-1, 64)
    y = torch.full(x.shape, 55, dtype=torch.int8, device=device).view(kind)
    scales = torch.full((len(x),), torch.nan, device=device)
    round_kernel[(len(x),)](x.to(device), y, scales, SIZE=64)
    numbers, expected = quantize_heads(x, kind)
    assert torch.equal(y.cpu().float(), numbers.float())
    assert torch.equal(scales.cpu(), expected)


CAPABILITIES = {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True}


@pytest.mark.parametrize(("capability", "works"), CAPABILITIES.items())
def test_a_gpu_without_e4m3_is_refused(
    capability: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    wanted = torch.device("cuda", 0)
    empty = torch.empty
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: empty(shape, dtype=dtype))
    if works:
        assert LayerCache.zeros(1, 1, 16, 8, E4M3, wanted).scales is not None
        return
    with pytest.raises(DeviceError, match="does not support an fp8 KV cache") as error:
        LayerCache.zeros(1, 1, 16, 8, E4M3, wanted)
    assert "kv_dtype=int8" in str(error.value)
    assert LayerCache.zeros(1, 1, 16, 8, torch.int8, wanted).scales is not None
