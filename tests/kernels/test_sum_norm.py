"""Split sums, bias, residual and norm against float64."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.norm.sum_norm import sum_norm, sum_norm_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

EPS = 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "rows", "hidden"), [(1, 1, 7), (4, 3, 96), (2, 9, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_sum_norm(
    impl: Implementation, dtype: torch.dtype, splits: int, rows: int, hidden: int, biased: bool
) -> None:
    parts = normal(splits, rows, hidden, dtype=torch.float32, device=impl.device)
    wide = normal(rows, hidden + 3, dtype=dtype, device=impl.device, seed=1)
    weight = normal(hidden, dtype=dtype, device=impl.device, seed=2)
    bias = normal(hidden, dtype=dtype, device=impl.device, seed=3) if biased else None
    residual = wide[:, :hidden]
    y, total = impl(sum_norm, sum_norm_triton)(parts, residual, weight, EPS, bias)
    expected = parts.double().sum(0) + residual.double()
    if bias is not None:
        expected = expected + bias.double()
    assert_near(total, expected)
    s = total.double()
    normed = (s * (s.square().mean(1, keepdim=True) + EPS).rsqrt()).to(dtype)
    assert_near(y, normed.double() * weight.double(), loosen=2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: Implementation) -> None:
    parts = torch.zeros(2, 0, 8, device=impl.device)
    residual, weight = torch.zeros(0, 8, device=impl.device), torch.ones(8, device=impl.device)
    y, total = impl(sum_norm, sum_norm_triton)(parts, residual, weight, EPS)
    assert y.shape == total.shape == (0, 8)


def test_refused() -> None:
    parts, residual, weight = torch.zeros(2, 3, 8), torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(IngotError, match="parts has the wrong shape"):
        sum_norm(parts[:, :2], residual, weight, EPS)
    with pytest.raises(IngotError, match="parts has the wrong dtype"):
        sum_norm(parts.half(), residual, weight, EPS)
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        sum_norm(parts, residual, weight, EPS, torch.zeros(7))
