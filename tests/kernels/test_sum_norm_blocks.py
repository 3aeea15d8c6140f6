"""Split sums that end in numbers by blocks: s against float64 and as of sum_norm, numbers by the rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.norm.sum_norm import sum_norm, sum_norm_triton
from ingot.kernels.rows.block_rows import quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Sums
from ingot.kernels.tiles.int8_tiles import small_int8_tiles
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_block_rows import assert_rows, block_steps

EPS = 1e-6
SHAPES = [(1, 1, 16, 16), (4, 3, 40, 32), (2, 5, 96, 32), (8, 2, 1000, 128)]  # parts, rows, width, block


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", ["no", "own", "fp32"])
@pytest.mark.parametrize(("bits", "ordered"), [(8, True), (8, False), (4, True), (4, False)])
def test_sum_norm(
    impl: Implementation,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    biased: str,
    bits: int,
    ordered: bool,
) -> None:
    splits, rows, width, block = shape
    parts = normal(splits, rows, width, dtype=torch.float32, device=impl.device)
    residual = normal(rows, width + 3, dtype=dtype, device=impl.device, seed=1)[:, :width]
    weight = normal(width, dtype=dtype, device=impl.device, seed=2)
    bias = None
    if biased != "no":
        kind = dtype if biased == "own" else torch.float32
        bias = normal(width, dtype=kind, device=impl.device, seed=3)
    steps = block_steps(width, block, bits, ordered, impl.device)
    norm = impl(sum_norm, sum_norm_triton)
    found, s = norm(parts, residual, weight, EPS, bias, ending=steps)
    expected = parts.double().sum(0) + residual.double()
    assert_near(s, expected if bias is None else expected + bias.double())
    y, expected_s = norm(parts, residual, weight, EPS, bias)
    assert torch.equal(s, expected_s)
    numbers = quantize_in_blocks(y, steps)
    if impl.device == "cuda":  # another kernel may add its squares in another order
        off = (found.values.int() - numbers.values.int()).abs()
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 1e-3
    else:
        assert_rows(found, numbers)
    assert width < 96 or {int(found.values.min()), int(found.values.max())} == {steps.low, steps.high}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_parts_of_any_stride_and_no_rows(impl: Implementation) -> None:
    op = partial(impl(sum_norm, sum_norm_triton), ending=block_steps(64, 32, 8, True, impl.device))
    parts = normal(3, 2, 64, dtype=torch.float32, device=impl.device).transpose(0, 1)  # 2 parts of 3 rows
    residual = normal(3, 64, dtype=torch.float16, device=impl.device, seed=1)
    found, s = op(parts, residual, residual[0], EPS)
    same, same_s = op(parts.contiguous(), residual, residual[0], EPS)
    assert_rows(found, same)
    assert torch.equal(s, same_s)
    found, s = op(parts[:, :0], residual[:0], residual[0], EPS)
    assert found.values.shape == s.shape == (0, 64)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_exact_sums(impl: Implementation) -> None:
    """Parts of int8 rows without groups are scaled on the way."""
    sums = int8_parts(3, 96, impl.device)
    residual = normal(3, 96, dtype=torch.float16, device=impl.device, seed=1)
    weight = normal(96, dtype=torch.float16, device=impl.device, seed=2)
    steps = block_steps(96, 32, 8, True, impl.device)
    norm = impl(sum_norm, sum_norm_triton)
    found, s = norm(sums, residual, weight, EPS, ending=steps)
    y, expected_s = norm(sums, residual, weight, EPS)
    assert torch.equal(s, expected_s)
    assert int((found.values.int() - quantize_in_blocks(y, steps).values.int()).abs().max()) <= (
        1 if impl.device == "cuda" else 0
    )


def int8_parts(rows: int, width: int, device: str) -> Int8Sums:
    """Two parts of exact sums, with scales that make them about one."""
    numbers = normal(2, rows, width, dtype=torch.float32, device=device) * 10_000
    scales = normal(rows, dtype=torch.float32, device=device, seed=3).abs() / 100
    return Int8Sums(
        numbers.int(), scales, normal(width, dtype=torch.float32, device=device, seed=4).abs() / 100
    )


def test_refused() -> None:
    parts, residual, weight = torch.zeros(2, 3, 96), torch.zeros(3, 96), torch.ones(96)
    steps = block_steps(96, 32, 8, True, "cpu")
    with pytest.raises(IngotError, match="parts has the wrong shape"):
        sum_norm(parts[:, :2], residual, weight, EPS, ending=steps)
    with pytest.raises(IngotError, match="parts has the wrong dtype"):
        sum_norm(parts.half(), residual, weight, EPS, ending=steps)
    with pytest.raises(IngotError, match="bias has the wrong dtype"):
        sum_norm(parts, residual, weight, EPS, torch.zeros(96, dtype=torch.float16), ending=steps)
    with pytest.raises(IngotError, match="steps"):
        sum_norm(parts, residual, weight, EPS, ending=block_steps(128, 32, 8, True, "cpu"))
    wide = torch.zeros(1, 1, 16300), torch.zeros(1, 16300), torch.ones(16300)
    with pytest.raises(IngotError, match="width in whole blocks"):
        sum_norm(*wide, EPS, ending=block_steps(16300, 250, 8, False, "cpu"))


@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("width", [4096, 11008])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_products_of_a_7b_are_split(rows: int, width: int, block: int) -> None:
    """Output and down product: a step is a block, every part has steps."""
    tiles = small_int8_tiles(rows, 4096, width, torch.device("cpu"), block, split=True)
    assert tiles["BLOCK_K"] == block
    assert 1 < tiles["SPLITS"] <= width // block
