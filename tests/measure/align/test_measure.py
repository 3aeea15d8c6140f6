"""The measures of a difference, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ingot.measure.align.stage_difference import (
    Common,
    at_least,
    common_factors,
    common_turns,
    measure,
    measure_logits,
    rms,
    statistics,
)


def test_every_token_weighs_the_same() -> None:
    expected = torch.tensor([[3000.0, 4000.0], [3.0, 4.0]])
    got = torch.tensor([[3000.0, 4000.0], [3.0, 6.5]])
    found = measure(expected, got)
    assert found.relative == pytest.approx(math.sqrt((0 + 0.5**2) / 2))
    assert (found.max_abs, found.token, found.channel) == (2.5, 1, 1)
    assert (measure(expected, expected).relative, measure(expected, expected).max_abs) == (0, 0)
    assert measure(expected, expected).cosine == pytest.approx(1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_on_one_side_is_an_infinite_difference(value: float) -> None:
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    one[1, 2] = value
    for found in (measure(one, other), measure(other, one)):
        assert (found.max_abs, found.relative) == (math.inf, math.inf)
        assert (found.token, found.channel) == (1, 2)
    if math.isinf(value):
        assert measure(one, one).max_abs == 0


def test_divergence_is_from_the_expected_side() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.75, 0.25], [0.2, 0.8]])
    found = measure_logits(p.log(), q.log())
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    assert found.kl != pytest.approx(float((q * (q / p).log()).sum(-1).mean()), rel=0.01)
    assert found.top1 == 0.5
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    assert measure_logits(logits, logits + 7).kl == pytest.approx(0, abs=1e-12)


def test_statistics_are_of_all_values() -> None:
    found = statistics(torch.tensor([[1.0, 3.0]], dtype=torch.float16))
    assert (found.shape, found.dtype, found.mean, found.std) == ((1, 2), "float16", 2.0, 1.0)


def test_the_cosine_is_each_token_s() -> None:
    expected = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    got = torch.tensor([[7.0, 7.0], [-3.0, 4.0]])
    assert measure(expected, got).cosine == pytest.approx((math.sqrt(0.5) + 7 / 25) / 2)


def test_the_range_of_values() -> None:
    found = statistics(torch.tensor([[1.0, -3.0], [2.0, 8.0]], dtype=torch.bfloat16))
    assert (found.shape, found.dtype, found.min, found.max, found.mean) == (
        (2, 2),
        "bfloat16",
        -3.0,
        8.0,
        2.0,
    )
    assert found.std == pytest.approx(math.sqrt((1 + 25 + 0 + 36) / 4))


def test_tensors_of_other_shapes_are_apart() -> None:
    found = measure(torch.ones(2, 3), torch.ones(2, 4))
    assert (found.max_abs, found.relative, found.cosine) == (math.inf, math.inf, 0.0)


HEADS, SIZE = 3, 4


def values() -> torch.Tensor:
    return torch.randn(5, HEADS * SIZE, generator=torch.Generator().manual_seed(6)).double()


def test_a_factor_of_one_head_is_found_in_that_head() -> None:
    """With the deviation that errors of each value by itself give it."""
    expected, floor = values(), 1e-3
    factors = torch.tensor([1.0, 1.02, 0.97], dtype=torch.float64).repeat_interleave(SIZE)
    found = list(common_factors(expected, expected * factors, floor, HEADS))
    assert [one.off for one in found] == pytest.approx([0.0, 0.02, 0.03], abs=1e-12)
    usual = expected.square().mean(1, keepdim=True).sqrt()
    for head, one in enumerate(found):
        a = expected[:, head * SIZE : (head + 1) * SIZE]
        own = floor * torch.maximum(a.abs(), usual)
        wanted = (own * a).square().sum().sqrt() / a.square().sum()
        assert one.noise == pytest.approx(float(wanted))
    (whole,) = common_factors(expected, expected * 1.01, floor)
    assert whole.off == pytest.approx(0.01)


@pytest.mark.parametrize("width", [4, 2])
def test_an_angle_of_one_pair_of_channels_is_found_in_that_pair(width: int) -> None:
    """Channel i turns with i + width / 2; those beyond the width turn with none."""
    expected, angle, floor = values(), 0.01, 1e-3
    got, half = expected.clone().view(5, HEADS, SIZE), width // 2
    first, second = (expected.view(5, HEADS, SIZE)[..., at] for at in (half - 1, width - 1))
    got[..., half - 1] = first * math.cos(angle) - second * math.sin(angle)
    got[..., width - 1] = first * math.sin(angle) + second * math.cos(angle)
    found = list(common_turns(expected, got.flatten(1), floor, HEADS, width))
    wanted = [0.0] * (half - 1) + [math.sin(angle)]
    assert [one.off for one in found] == pytest.approx(wanted, abs=1e-12)
    usual = expected.square().mean(1)[:, None].sqrt()
    own = [floor * torch.maximum(part.abs(), usual) for part in (first, second)]
    noise = ((own[0] * second).square() + (own[1] * first).square()).sum().sqrt()
    assert found[-1].noise == pytest.approx(float(noise / (first.square() + second.square()).sum()))


def test_noise_of_what_is_common_has_a_least() -> None:
    tests = [Common(0.5, 0.1), Common(0.2, 0.4)]
    assert list(at_least(tests, 0.3)) == [Common(0.5, 0.3), Common(0.2, 0.4)]
    assert rms([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))
