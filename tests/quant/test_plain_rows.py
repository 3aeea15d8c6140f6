"""The references' own rounding of activations, against the kernels' rule."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.rows.int8_rows import dequantize_rows, quantize_rows
from ingot.quant.plain_rows import rounded_rows

STEP = torch.tensor([0.01])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("group", "step"), [(0, None), (16, None), (0, STEP), (16, STEP)])
def test_it_is_the_rule_of_the_kernels(group: int, step: torch.Tensor | None, dtype: torch.dtype) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    near = rounded_rows(x.to(dtype), group, step)
    assert near.dtype == dtype
    expected = dequantize_rows(quantize_rows(x, 0 if step is not None else group, step))
    torch.testing.assert_close(near.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "step"), [(0, None), (16, None), (0, STEP)])
def test_one_value_of_each_row_goes_the_other_way(group: int, step: torch.Tensor | None) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    plain, other = (rounded_rows(x, group, step, flips=flips) for flips in (False, True))
    differs = (plain - other).abs() > 1e-6
    assert differs.sum(-1).tolist() == [1] * 40
    worse = (other - x)[differs].abs() / (plain - x)[differs].abs()
    assert 1 < float(worse.max()) < 1.5  # the closest of 64 calls is close


def test_rows_of_zeros_stay() -> None:
    assert not rounded_rows(torch.zeros(3, 8), flips=True).any()
