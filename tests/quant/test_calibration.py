"""Statistics of an input: the same whatever the batches."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import BuildError
from ingot.quant.methods.activation_statistics import ChannelRange, InputStatistics, TokenSample
from tests.quant.inputs import inputs


def test_ranges_of_batches_are_ranges_of_all() -> None:
    x, seen = inputs(100, 24), ChannelRange(24)
    for batch in (x[:1], x[1:1], x[1:60], x[60:].double()):
        seen.add(batch)
    assert torch.equal(seen.lowest, x.amin(0))
    assert torch.equal(seen.highest, x.amax(0))
    assert torch.equal(seen.absmax(), x.abs().amax(0))
    torch.testing.assert_close(seen.mean_abs(), x.abs().mean(0))
    again = ChannelRange.from_tensors(seen.tensors())
    assert again.count == 100
    assert torch.equal(again.mean_abs(), seen.mean_abs())
    assert torch.equal(again.absmax(), seen.absmax())


def test_ranges_refuse_what_is_not_finite() -> None:
    seen = ChannelRange(4)
    with pytest.raises(BuildError, match="no token"):
        seen.absmax()
    x = torch.ones(2, 4)
    x[1, 2] = torch.nan
    seen.add(x)
    with pytest.raises(BuildError, match="channel 2"):
        seen.mean_abs()


def test_a_sample_is_fair_and_the_same_again() -> None:
    x = torch.arange(4000.0)[:, None].expand(-1, 3)
    samples = [TokenSample(3, rows=400, seed=seed) for seed in (0, 0, 1)]
    for sample, step in zip(samples, (37, 37, 37), strict=True):
        for batch in x.split(step):
            sample.add(batch)
    first, second, other = (sample.x[:, 0] for sample in samples)
    assert first.shape == (400,)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert len(set(first.tolist())) == 400
    assert torch.equal(first, first.sort().values)
    assert abs(float(first.mean()) - 2000) < 200


def test_few_tokens_are_all_kept() -> None:
    seen = InputStatistics.of(8, hessian=True, sample=16)
    x = inputs(10, 8)
    seen.add(x[:3])
    seen.add(x[3:])
    assert seen.sample is not None
    assert seen.hessian is not None
    assert torch.equal(seen.sample.x, x)
    torch.testing.assert_close(seen.hessian.mean().diagonal(), x.square().mean(0))
    assert InputStatistics.of(8).hessian is None
