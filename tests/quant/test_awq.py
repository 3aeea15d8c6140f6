"""AWQ's scales and ranges against plain rounding; folding against fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ingot.errors import ConfigError
from ingot.quant.methods.awq import clip_limits, clipped, search_scales
from ingot.quant.methods.channel_folding import (
    class_max,
    fold_into_columns,
    fold_into_norm,
    fold_into_rows,
    one_a_class,
    value_rows,
)
from ingot.quant.methods.rounding import CLIP_RATIOS, dequantize, quantize
from tests.quant.inputs import inputs, weights


def rounded(weight: torch.Tensor, group: int, symmetric: bool) -> torch.Tensor:
    return dequantize(quantize(weight, 4, group, symmetric=symmetric))


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_and_limits_beat_rounding(group: int, symmetric: bool) -> None:
    """On tokens that were not calibrated with; and each step on top of the one before."""
    own, x = [weights(40, 200), weights(24, 200, seed=1)], inputs(800, 200)
    seen, unseen = x[:400], x[400:]
    fake = partial(rounded, group=group, symmetric=symmetric)
    found = search_scales(own, seen, fake, group=group)
    assert found.error < 0.7 * found.plain_error
    assert 0 < found.exponent <= 1
    errors = []
    for weight in own:
        scaled = fold_into_columns(weight, found.scales)
        limits = clip_limits(scaled, seen / found.scales, 4, group, symmetric=symmetric)
        assert limits.shape == ((4, len(weight)) if group else (len(weight),))
        narrow = clipped(scaled, limits, group)
        assert float(narrow.abs().max()) <= float(scaled.abs().max())
        y, quiet = unseen @ weight.T, unseen / found.scales
        near = [unseen @ fake(weight).T, quiet @ fake(scaled).T, quiet @ fake(narrow).T]
        errors.append(torch.stack([(one - y).square().sum() for one in near]))
    plain, scaled_error, clipped_error = torch.stack(errors).sum(0).tolist()
    assert scaled_error < 0.75 * plain
    assert clipped_error < 0.97 * scaled_error


def test_even_inputs_and_zeros_are_left_nearly_alone() -> None:
    fake = partial(rounded, group=32, symmetric=True)
    found = search_scales([weights(16, 64)], torch.zeros(8, 64), fake)
    assert found.exponent == 0
    assert bool((found.scales == 1).all())
    x = inputs(100, 64)
    x[:, :8] = 0
    found = search_scales([weights(16, 64)], x, fake)
    assert bool(torch.isfinite(found.scales).all())
    assert float(found.scales.max() / found.scales.min()) <= 1.01e4


def test_one_search_for_all_that_read_an_input() -> None:
    fake = partial(rounded, group=32, symmetric=True)
    x, first, second = inputs(200, 64), weights(16, 64), weights(8, 64, seed=2)
    together = search_scales([first, second], x, fake)
    alone = [search_scales([one], x, fake) for one in (first, second)]
    assert together.plain_error == pytest.approx(sum(one.plain_error for one in alone), rel=1e-5)
    assert together.error >= sum(one.error for one in alone) * (1 - 1e-6)
    with pytest.raises(ConfigError, match="different widths"):
        search_scales([weights(16, 32)], x, fake)


def test_scales_by_the_weights_magnitudes_alone() -> None:
    """Inputs that are all as large leave the share of each column, whose signs must not cancel."""
    x = inputs(200, 64, loud=0).sign()
    weight = weights(16, 64)
    weight[:, ::5] *= 6
    found = search_scales([weight], x, partial(rounded, group=32, symmetric=True), group=32)
    assert 0 < found.exponent < 1
    blocks = weight.abs().view(16, 2, 32)
    share = (blocks / blocks.amax(-1, keepdim=True)).mean(0).flatten()
    expected = share ** (found.exponent - 1)
    torch.testing.assert_close(found.scales / found.scales[0], expected / expected[0])


@pytest.mark.parametrize("group", [0, 32])
def test_limits_are_those_of_least_error_of_the_product(group: int) -> None:
    """Tried one by one, with the tokens themselves: channels move together, and so do their errors."""
    weight, x = weights(12, 64), inputs(100, 64, loud=0)
    found = clip_limits(weight, x, 4, group)
    limits = found if group else found[None]
    width = group or 64
    for part, limit in enumerate(limits):
        own = slice(part * width, (part + 1) * width)
        peaks = weight[:, own].abs().amax(1)

        def error(limit: torch.Tensor, own: slice = own) -> torch.Tensor:
            near = rounded(clipped(weight[:, own], limit), 0, True)
            return (x[:, own] @ (near - weight[:, own]).T).square().sum(0)

        least = torch.stack([error(peaks * ratio) for ratio in CLIP_RATIOS]).amin(0)
        torch.testing.assert_close(error(limit), least, rtol=1e-3, atol=0)


def test_folding_changes_nothing_in_fp64() -> None:
    """A norm and two products with attention's sharing of value heads between them."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, kv_heads, size = 4, 2, 8
    x, norm, norm_bias = draw(10, 32), draw(32), draw(32)
    values, bias, output = draw(kv_heads * size, 32), draw(kv_heads * size), draw(20, heads * size)
    rows = value_rows(heads, kv_heads, size)

    def run(norm, norm_bias, values, bias, output):  # type: ignore[no-untyped-def]
        normed = torch.nn.functional.layer_norm(x, (32,), norm, norm_bias)
        return (normed @ values.T + bias)[:, rows] @ output.T

    first = draw(32).exp()
    second = class_max(draw(heads * size).exp(), rows)
    new_norm, new_bias = fold_into_norm(norm, first, norm_bias)
    new_values = fold_into_columns(values, first)
    new_values, new_values_bias = fold_into_rows(new_values, bias, one_a_class(second, rows))
    after = run(new_norm, new_bias, new_values, new_values_bias, fold_into_columns(output, second))
    before = run(norm, norm_bias, values, bias, output)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_folding_gives_fp32_and_refuses_bad_scales() -> None:
    weight = weights(4, 6).half()
    assert fold_into_columns(weight, torch.ones(6)).dtype == torch.float32
    assert fold_into_rows(weight, None, torch.ones(4))[0].dtype == torch.float32
    assert fold_into_norm(weight[0], torch.ones(6))[0].dtype == torch.float32
    bad = torch.ones(6)
    bad[2] = 0
    with pytest.raises(ConfigError, match="channel 2: 0"):
        fold_into_norm(weight[0], bad)
    with pytest.raises(ConfigError, match="one scale per channel"):
        fold_into_rows(weight, None, torch.ones(6))
