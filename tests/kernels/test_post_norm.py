"""Norms whose weights are wider than their rows, and branches that are normed before they are added."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from ingot.errors import IngotError
from ingot.kernels.norm.post_norm import post_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from ingot.kernels.rows.int8_rows import quantize_rows
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.kernels.rows.row_endings import InInt8, OperandOrder
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_int8_ends import assert_rows

EPS = 1e-6
SHAPES = [(0, 32), (3, 96), (2, 1024), (1, 4096)]


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(dim=1, keepdim=True) + EPS) * weight.double()


def inputs(
    rows: int, hidden: int, dtype: torch.dtype, device: str, *, wide: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A branch, the hidden states, and two weights."""
    x, residual = (normal(rows, hidden, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    of = torch.float32 if wide else dtype
    post, weight = (1 + 0.3 * normal(hidden, dtype=of, device=device, seed=seed) for seed in (2, 3))
    return x, residual, post, weight


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_wide_weight_is_rounded_with_its_row(
    impl: Implementation, dtype: torch.dtype, with_residual: bool
) -> None:
    """Bit by bit as Gemma's norm: a 16-bit weight plus one in fp32, one rounding at the end."""
    x, residual, stored, _ = inputs(16, 64, dtype, impl.device, wide=False)
    theirs = Gemma2RMSNorm(64, EPS).to(x)
    theirs.weight.data = stored
    added = residual if with_residual else None
    y, s = impl(rms_norm)(x, 1 + stored.float(), EPS, added)
    expected = theirs(x + residual if with_residual else x)
    same = float((y == expected).float().mean())
    assert (
        same == 1 if impl.device == "cpu" and not impl.interpreted else same > 0.99
    )  # sums in another order
    assert y.dtype == s.dtype == dtype
    narrow, _ = impl(rms_norm)(x, (1 + stored.float()).to(dtype), EPS, added)
    assert float((narrow == y).float().mean()) < 0.9, "rounding the weight shows"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_and_blocks_take_wide_weights(impl: Implementation, dtype: torch.dtype) -> None:
    x, residual, _, weight = inputs(5, 96, dtype, impl.device, wide=True)
    parts = torch.stack([x.float(), torch.zeros_like(x, dtype=torch.float32)])
    y, s = impl(rms_norm)(x, weight, EPS, residual)
    summed, total = impl(sum_norm)(parts, residual, weight, EPS)
    assert torch.equal(total, s)
    assert_near(summed, y.double())
    ends = torch.full((3,), 8 / 255, device=impl.device), torch.zeros(3, device=impl.device)
    steps = BlockSteps(*ends, block=32, bits=8)
    found, stream = impl(rms_norm)(x, weight, EPS, residual, ending=steps)
    assert torch.equal(stream, s)
    assert int((found.values.int() - quantize_in_blocks(y, steps).values.int()).abs().max()) <= 1


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [False, True])
def test_post_norm(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], wide: bool) -> None:
    x, residual, post, weight = inputs(*shape, dtype, impl.device, wide=wide)
    y, s = impl(post_norm)(x, residual, post, weight, EPS)
    assert_near(s, norm64(x, post) + residual.double())
    assert_near(y, norm64(s, weight))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_two_norms_one_after_another(impl: Implementation, dtype: torch.dtype) -> None:
    """To the bit, in one kernel or two; and so are its other ends."""
    x, residual, post, weight = inputs(7, 320, dtype, impl.device, wide=True)
    norm = impl(rms_norm)
    expected, stream = norm(norm(x, post, EPS)[0], weight, EPS, residual)
    given = (x, residual, post, weight, EPS)
    both = impl(post_norm)
    y, s = both(*given)
    if impl.device == "cuda":  # one kernel may add its squares in another order than the other
        assert_near(y, expected.double())
        assert_near(s, stream.double())
    else:
        assert torch.equal(y, expected)
        assert torch.equal(s, stream)
    ordered, total = both(*given, ending=OperandOrder())
    assert torch.equal(ordered.values, operand_rows(y).values)
    assert torch.equal(total, s)
    for static in (None, torch.tensor([0.02], device=impl.device)):
        rows, total = both(*given, ending=InInt8(static))
        assert_rows(rows, quantize_rows(y, static=static))
        assert torch.equal(total, s)
    ends = torch.full((10,), 8 / 255, device=impl.device), torch.zeros(10, device=impl.device)
    steps = BlockSteps(*ends, block=32, bits=8)
    rows, total = both(*given, ending=steps)
    assert torch.equal(total, s)
    assert int((rows.values.int() - quantize_in_blocks(y, steps).values.int()).abs().max()) <= 1


def test_refused() -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(IngotError, match="residual has the wrong shape"):
        post_norm(x, torch.zeros(3, 4), weight, weight, EPS)
    with pytest.raises(IngotError, match="post has the wrong shape"):
        post_norm(x, x, weight[:3], weight, EPS)
    with pytest.raises(IngotError, match="has the wrong dtype"):
        post_norm(x, x, weight.half(), weight, EPS)
    with pytest.raises(IngotError, match="whole spans"):
        post_norm(x, x, weight, weight, EPS, ending=OperandOrder())
