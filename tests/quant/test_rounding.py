"""Numbers of few bits: nearest, exact where they can be, and refused where they cannot."""

from __future__ import annotations

import math

import pytest
import torch

from ingot.errors import BuildError, ConfigError
from ingot.quant.methods.rounding import bounds, dequantize, quantize
from ingot.quant.quantized_values import Quantized
from tests.quant.inputs import shrunk, weights

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CASES = [
    (8, 0, True),
    (8, 64, True),
    (8, 0, False),
    (4, 0, True),
    (4, 32, True),
    (4, 32, False),
    (4, 50, False),
]


def relative(found: Quantized, weight: torch.Tensor) -> float:
    return float((dequantize(found) - weight.float()).norm() / weight.float().norm())


def scales_by_column(found: Quantized) -> torch.Tensor:
    scales = found.scales.float()
    if not found.group:
        return scales[:, None].expand(found.values.shape)
    return scales.repeat_interleave(found.group, 0)[: found.values.shape[1]].T


@pytest.mark.grid
@pytest.mark.parametrize(("bits", "group", "symmetric"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 160), (3, 33), (1, 1)])
def test_every_number_is_the_nearest(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Half a step at most, but for what the last step of a range cannot reach."""
    weight = weights(*shape, seed=bits).to(dtype)
    found = quantize(weight, bits, group, symmetric=symmetric, scale_dtype=dtype)
    low, high = bounds(bits, symmetric)
    assert found.scales.dtype == dtype
    assert (found.zeros is None) == symmetric
    assert low <= int(found.values.min()) <= int(found.values.max()) <= high
    groups = -(-shape[1] // group) if group else 0
    assert found.scales.shape == ((groups, shape[0]) if group else (shape[0],))
    steps = ((dequantize(found) - weight.float()) / scales_by_column(found)).abs()
    reached = (found.values > low) & (found.values < high)
    assert float((steps * reached).max()) <= 0.5 + 1e-4
    assert float(steps.max()) <= 1 + 1e-2


@pytest.mark.parametrize(("bits", "group", "symmetric"), CASES)
def test_a_weight_that_fits_the_grid_comes_back(bits: int, group: int, symmetric: bool) -> None:
    first = quantize(weights(6, 100), bits, group, symmetric=symmetric)
    again = quantize(dequantize(first), bits, group, symmetric=symmetric)
    torch.testing.assert_close(dequantize(again), dequantize(first), rtol=2e-3, atol=1e-5)


def test_more_bits_and_smaller_groups_are_nearer() -> None:
    weight = weights(64, 512)
    errors = [
        relative(quantize(weight, 8), weight),
        relative(quantize(weight, 4, 32), weight),
        relative(quantize(weight, 4, 128), weight),
        relative(quantize(weight, 4), weight),
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.01
    assert relative(quantize(weight, 4, 32, symmetric=False), weight) < errors[1]


def test_all_sixteen_numbers_are_used_and_beat_seven_steps_a_side() -> None:
    """The scale max|w| / 7 leaves a number unused; the documented errors are of these inputs' kind."""
    weight = weights(256, 1024)
    found = quantize(weight, 4, 128)
    assert sorted(set(found.values.flatten().tolist())) == list(range(16))
    blocks = weight.view(256, -1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).half().float()
    seven = (blocks / scale).round().clamp(-8, 7) * scale - blocks
    assert relative(found, weight) < 0.9 * float(seven.norm() / weight.norm())
    assert relative(found, weight) == pytest.approx(0.1035, abs=0.002)


def test_numbers_follow_the_scale_that_is_stored() -> None:
    """A scale rounded after the numbers were chosen would shift every weight of its row the same way."""
    weight = weights(40, 16384)
    near = dequantize(quantize(weight, 8, scale_dtype=torch.bfloat16))
    bias = (near * weight).sum(1) / weight.square().sum(1) - 1
    assert float(bias.abs().mean()) < 2e-4  # bf16 rounds by 1e-3 on the average


def test_clipping_is_no_worse_and_helps_long_tails() -> None:
    weight = weights(64, 256)
    weight[:, 7] *= 6
    for group in (0, 64):
        plain, narrow = quantize(weight, 4, group), shrunk(weight, 4, group)
        assert relative(narrow, weight) < 0.97 * relative(plain, weight)


def test_importance_moves_the_clipping() -> None:
    """A large weight that matters keeps its value; one whose input is 0 may be cut."""
    weight = weights(32, 64)
    weight[:, 3] = 1.0
    for important, worst in ((100.0, 0.02), (0.0, 1.0)):
        importance = torch.ones(64)
        importance[3] = important
        near = dequantize(shrunk(weight, 4, importance=importance))
        assert float((near - weight)[:, 3].abs().mean()) <= worst
        rest = (near - weight)[:, 4:].norm()
        assert (rest < 0.8 * (dequantize(quantize(weight, 4)) - weight)[:, 4:].norm()) == (important == 0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros(bits: int, symmetric: bool) -> None:
    weight = weights(4, 64)
    weight[1] = 0
    weight[2, 32:] = 0
    near = dequantize(quantize(weight, bits, 32, symmetric=symmetric))
    assert not near[1].any()
    assert not near[2, 32:].any()
    assert bool(torch.isfinite(near).all())


def test_scales_below_the_normal_numbers_of_fp16() -> None:
    """Rounded to the nearest, some of these scales would lose a quarter of their range."""
    weight = weights(64, 128) * torch.logspace(-7, -3, 64)[:, None]
    near = dequantize(quantize(weight, 4))
    worst = (near - weight).abs().amax(1) / weight.abs().amax(1)
    tiny = weight.abs().amax(1) < 4 * 2**-24
    assert float(worst[~tiny].max()) < 0.26
    assert bool(torch.isfinite(near).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_weight_is_kept_whatever_its_scale(bits: int, symmetric: bool) -> None:
    """Scales of 1 to 3 of fp16's smallest steps: one that is rounded down cuts the ends of its range."""
    ends = 8 if symmetric and bits == 4 else bounds(bits, symmetric)[1]
    peaks = torch.arange(1.05, 3.0, 0.1)[:, None] * 2**-24 * ends
    weight = peaks * torch.linspace(0 if not symmetric else -1, 1, 33)
    found = quantize(weight, bits, symmetric=symmetric)
    assert float(found.scales.abs().max()) < 2**-14
    steps = (dequantize(found) - weight)[:, [0, -1]].abs() / found.scales.float().abs()[:, None]
    assert float(steps.max()) <= 1 + 1e-2


def test_eight_bits_end_at_127_on_both_sides() -> None:
    """Also where a range was cut and larger weights are left outside."""
    weight = weights(8, 64)
    weight[:4, 5], weight[4:, 5] = -0.6, 0.6
    importance = torch.ones(64)
    importance[5] = 0
    found = shrunk(weight, 8, importance=importance)
    assert float((dequantize(found) - weight)[:, 5].abs().min()) > 0.02
    assert found.values[:, 5].tolist() == [-127] * 4 + [127] * 4


def test_refusals_name_the_row() -> None:
    weight = weights(5, 8)
    weight[3, 2] = math.nan
    weight[4, 1] = math.inf
    with pytest.raises(BuildError, match=r"row 3, column 2: nan; 2 of 5 rows"):
        quantize(weight, 8)
    with pytest.raises(BuildError, match="does not fit fp16"):
        quantize(weights(2, 2) * 1e9, 8)
    with pytest.raises(ConfigError, match="unsupported number of bits"):
        quantize(weights(2, 2), 5)
    with pytest.raises(ConfigError, match="only floating-point matrices"):
        quantize(torch.ones(4), 8)
    with pytest.raises(ConfigError, match="0 or positive"):
        quantize(weights(2, 2), 8, -1)


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(10, 96)
    whole = quantize(weight, 4, 32, symmetric=False)
    monkeypatch.setattr("ingot.quant.methods.rounding._PIECE", 200)
    pieces = quantize(weight, 4, 32, symmetric=False)
    for name in ("values", "scales", "zeros"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))


def test_numbers_in_another_order_are_put_back() -> None:
    """Column j of the numbers is the weight's column order[j]; a cycle of three is not its own inverse."""
    weight, order = weights(4, 6), torch.tensor([2, 0, 1, 5, 3, 4], dtype=torch.int32)
    found = quantize(weight[:, order.long()], 8)
    ordered = Quantized(found.values, found.scales, None, 8, 0, order=order)
    assert torch.equal(dequantize(ordered), dequantize(quantize(weight, 8)))
