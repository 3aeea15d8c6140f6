"""LayerNorm of hidden states that lack the biases of products before it, against float64."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.norm.layer_norm import layer_norm_behind
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, assert_near, normal

EPS = 1e-5
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("keeps", [False, True])
def test_norm_of_x_and_biases(impl: Implementation, dtype: torch.dtype, count: int, keeps: bool) -> None:
    rows, size = 3, 70
    x, *lacking = (normal(*s, dtype=dtype, device=impl.device, seed=i) for i, s in
                   enumerate([(rows, size), *[(size,)] * count]))  # fmt: skip
    weight, bias = (normal(size, dtype=dtype, device=impl.device, seed=7 + i) for i in range(2))
    before = x.clone()
    y, s = impl(layer_norm_behind)(x, weight, bias, EPS, lacking, keeps=keeps)
    total = sum((one.double() for one in lacking), x.double()).to(dtype)
    wide = total.double()
    centred = wide - wide.mean(dim=1, keepdim=True)
    expected = centred / torch.sqrt((centred**2).mean(dim=1, keepdim=True) + EPS) * weight.double()
    assert_near(y, expected + bias.double())
    assert torch.equal(x, before)
    assert (s is x) == (not lacking or not keeps)
    if keeps:
        assert_near(s, wide)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: Implementation) -> None:
    x, vector = torch.zeros(0, 8, device=impl.device), torch.ones(8, device=impl.device)
    y, s = impl(layer_norm_behind)(x, vector, vector, EPS, (vector, vector))
    assert y.shape == s.shape == (0, 8)


def test_refused() -> None:
    x, vector = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(IngotError, match="lacking has the wrong shape"):
        layer_norm_behind(x, vector, vector, EPS, (vector, torch.ones(1)))
    with pytest.raises(IngotError, match="lacking has the wrong dtype"):
        layer_norm_behind(x, vector, vector, EPS, (vector.half(),))
