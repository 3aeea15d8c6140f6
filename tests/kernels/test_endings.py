"""Norms that end in a form of rows give their own rows in that form; sums of parts against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.norm_kernel import Parts
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.rows.block_rows import quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, quantize_rows
from ingot.kernels.rows.operand_rows import OperandRows, operand_rows
from ingot.kernels.rows.row_endings import Ending, InInt8, OperandOrder, Rows
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_block_rows import assert_rows, block_steps

EPS = 1e-6
FORMS = ["operand", "int8", "static", "8 bits", "8 bits ordered", "4 bits", "4 bits ordered"]
SHAPES = [  # rows, width, block
    (1, 1, 16), (3, 7, 16), (1, 16, 16), (3, 40, 32), (5, 96, 32), (2, 1000, 128), (1, 4096, 128),
]  # fmt: skip
CASES = [(form, shape) for form in FORMS for shape in SHAPES if form != "operand" or shape[1] % 32 == 0]
SUMS = [
    ("fp32", 1, None), ("fp32", 4, "own"), ("fp32", 2, torch.float32),
    ("rows", 3, "own"), ("rows", 2, torch.float32), ("static", 8, None),
]  # fmt: skip
Shape = tuple[int, int, int]


def ending_of(
    form: str, width: int, block: int, device: str
) -> tuple[Ending, Callable[[torch.Tensor], Rows]]:
    """An ending, and its rule for finished rows in plain PyTorch. The static scale cuts normal values."""
    if form == "operand":
        return OperandOrder(), operand_rows
    if form == "int8":
        return InInt8(), quantize_rows
    if form == "static":
        scale = torch.tensor([2.0 / 127], device=device)
        return InInt8(scale), partial(quantize_rows, static=scale)
    steps = block_steps(width, block, int(form[0]), "ordered" in form, device)
    return steps, partial(quantize_in_blocks, steps=steps)


def assert_ended(found: Rows, expected: Rows, form: str, device: str) -> None:
    """The same rows; on a GPU a kernel that ends otherwise may add its squares in another order."""
    if isinstance(found, OperandRows) and isinstance(expected, OperandRows):
        assert_near(found.natural(), expected.natural().double(), loosen=2)
        assert device == "cuda" or torch.equal(found.values, expected.values)
        return
    assert isinstance(found, Int8Rows)
    assert isinstance(expected, Int8Rows)
    if device == "cuda" and "bits" in form:
        off = (found.values.int() - expected.values.int()).abs()
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 1e-3
    else:
        assert_rows(found, expected)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "shape"), CASES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm(
    impl: Implementation, dtype: torch.dtype, form: str, shape: Shape, with_residual: bool, kind: str
) -> None:
    rows, width, block = shape
    x = normal(rows, width + 3, dtype=dtype, device=impl.device)[:, :width]
    weight = normal(width, dtype=dtype, device=impl.device, seed=1)
    residual = normal(rows, width, dtype=dtype, device=impl.device, seed=2) if with_residual else None
    ending, rule = ending_of(form, width, block, impl.device)
    norm = partial(impl(rms_norm), x, weight)
    if kind == "layer":
        bias = normal(width, dtype=dtype, device=impl.device, seed=3)
        norm = partial(impl(layer_norm), x, weight, bias)
    found, s = norm(EPS, residual, ending=ending)
    y, expected_s = norm(EPS, residual)
    assert_ended(found, rule(y), form, impl.device)
    assert torch.equal(s, expected_s)
    assert (s is x) == (residual is None)


def parts_of(sums: str, splits: int, rows: int, width: int, device: str) -> tuple[Parts, torch.Tensor]:
    """Parts of a product, and its float64: of fp32, or exact ones with a scale a row or one for all."""
    parts = normal(splits, rows, width, dtype=torch.float32, device=device)
    if sums == "fp32":
        return parts, parts.double().sum(0)
    exact = (parts * 10_000).int()
    row_scales = normal(rows if sums == "rows" else 1, dtype=torch.float32, device=device, seed=3).abs() / 100
    weight_scales = normal(width, dtype=torch.float32, device=device, seed=4).abs() / 100
    wide = exact.sum(0).double() * row_scales[:, None].double() * weight_scales.double()
    return Int8Sums(exact, row_scales, weight_scales), wide


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "shape"), [case for case in CASES if case[1] in SHAPES[1:6]])
@pytest.mark.parametrize(("sums", "splits", "bias_dtype"), SUMS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_sum_norm(
    impl: Implementation,
    dtype: torch.dtype,
    form: str,
    shape: Shape,
    sums: str,
    splits: int,
    bias_dtype: torch.dtype | str | None,
    kind: str,
) -> None:
    """From any parts to the model's dtype, and to every form."""
    rows, width, block = shape
    parts, expected = parts_of(sums, splits, rows, width, impl.device)
    residual = normal(rows, width + 3, dtype=dtype, device=impl.device, seed=1)[:, :width]
    weight = normal(width, dtype=dtype, device=impl.device, seed=2)
    bias = None
    expected = expected + residual.double()
    if bias_dtype is not None:
        own = dtype if bias_dtype == "own" else torch.float32
        bias = normal(width, dtype=own, device=impl.device, seed=5)
        expected = expected + bias.double()
    shift = normal(width, dtype=dtype, device=impl.device, seed=6) if kind == "layer" else None
    norm = partial(impl(sum_norm), shift=shift)
    y, total = norm(parts, residual, weight, EPS, bias)
    assert_near(total, expected)
    s = total.double()
    if shift is not None:
        s = s - s.mean(1, keepdim=True)
    normed = s * (s.square().mean(1, keepdim=True) + EPS).rsqrt()
    if shift is None:
        assert_near(y, normed.to(dtype).double() * weight.double(), loosen=2)
    else:
        assert_near(y, normed * weight.double() + shift.double(), loosen=2)
    ending, rule = ending_of(form, width, block, impl.device)
    found, stream = norm(parts, residual, weight, EPS, bias, ending=ending)
    assert torch.equal(stream, total)
    assert_ended(found, rule(y), form, impl.device)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_any_stride_and_no_rows(impl: Implementation, form: str) -> None:
    ending, _ = ending_of(form, 64, 32, impl.device)
    op = partial(impl(sum_norm), ending=ending)
    parts = normal(3, 2, 64, dtype=torch.float32, device=impl.device).transpose(0, 1)  # 2 parts of 3 rows
    residual = normal(3, 64, dtype=torch.float16, device=impl.device, seed=1)
    found, s = op(parts, residual, residual[0], EPS)
    same, same_s = op(parts.contiguous(), residual, residual[0], EPS)
    assert torch.equal(found.values, same.values)
    assert torch.equal(s, same_s)
    found, s = op(parts[:, :0], residual[:0], residual[0], EPS)
    assert found.values.shape == s.shape == (0, 64)


def test_no_rows() -> None:
    y, total = sum_norm(torch.zeros(2, 0, 8), torch.zeros(0, 8), torch.ones(8), EPS)
    assert y.shape == total.shape == (0, 8)


@pytest.mark.parametrize("form", [None, "8 bits ordered"])
def test_refused(form: str | None) -> None:
    parts, residual, weight = torch.zeros(2, 3, 96), torch.zeros(3, 96), torch.ones(96)
    reported = {} if form is None else {"ending": ending_of(form, 96, 32, "cpu")[0]}
    with pytest.raises(IngotError, match="parts has the wrong shape"):
        sum_norm(parts[:, :2], residual, weight, EPS, **reported)
    with pytest.raises(IngotError, match="parts has the wrong dtype"):
        sum_norm(parts.half(), residual, weight, EPS, **reported)
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        sum_norm(parts, residual, weight, EPS, torch.zeros(95), **reported)
    with pytest.raises(IngotError, match="bias has the wrong dtype"):
        sum_norm(parts, residual, weight, EPS, torch.zeros(96, dtype=torch.float16), **reported)
    with pytest.raises(IngotError, match="bias has the wrong dtype"):
        sum_norm(parts, residual, weight, EPS, shift=weight.half(), **reported)


@pytest.mark.parametrize(
    ("ending", "width", "message"),
    [
        (OperandOrder(), 48, "whole spans"),
        (InInt8(torch.ones(2)), 96, "static has the wrong shape"),
        (block_steps(128, 32, 8, True, "cpu"), 96, "steps"),
        (block_steps(16300, 250, 8, False, "cpu"), 16300, "width in whole blocks"),
    ],
)
def test_refused_endings(ending: Ending, width: int, message: str) -> None:
    x, weight = torch.ones(2, width), torch.ones(width)
    with pytest.raises(IngotError, match=message):
        rms_norm(x, weight, EPS, ending=ending)
    with pytest.raises(IngotError, match=message):
        layer_norm(x, weight, weight, EPS, ending=ending)
    with pytest.raises(IngotError, match=message):
        sum_norm(x[None], x, weight, EPS, ending=ending)
