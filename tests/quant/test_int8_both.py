"""What w8a8 stores, means and computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import BuildError
from ingot.kernels.product.int8 import cpu_product
from ingot.kernels.rows.int8_rows import dequantize_rows, quantize_rows
from ingot.layers.linear import Linear, loaded_dtype
from ingot.quant.plain_rows import rounded_rows
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.scheme_registry import make_scheme

FORMS = [Int8Both(), Int8Both(per_tensor=True), Int8Both(static=True), Int8Both(input_group=8)]
STEP = torch.tensor([0.03])
SMALL_STEP = torch.tensor([0.01])


def some(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("scheme", FORMS)
@pytest.mark.parametrize("columns", [40, 64, 1500 * 8])
def test_the_product_is_that_of_what_the_numbers_mean(scheme: Int8Both, columns: int) -> None:
    weight, bias, x = some(19, columns), torch.randn(19), torch.randn(2, 3, columns)
    tensors = scheme.pack(weight, bias, STEP if scheme.static else None)
    rows = scheme.quantize_input(x.view(6, columns), tensors)
    wide = dequantize_rows(rows).double() @ scheme.dequantize(tensors, columns, torch.float64).T + bias
    found = scheme.apply(x, tensors)
    torch.testing.assert_close(found, wide.float().view(2, 3, 19), rtol=1e-5, atol=1e-5 * columns**0.5)
    exact = torch.nn.functional.linear(x, weight, bias)
    assert float((found - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_numbers_are_the_nearest(dtype: torch.dtype, per_tensor: bool) -> None:
    scheme, weight = Int8Both(per_tensor=per_tensor), some(7, 40, dtype)
    tensors = scheme.pack(weight, None)
    steps = tensors["scales"][:, None].expand(7, 40)
    assert tensors["scales"].dtype == torch.float32
    assert len(tensors["scales"].unique()) == (1 if per_tensor else 7)
    off = (scheme.dequantize(tensors, 40, torch.float64) - weight.double()).abs()
    assert bool((off <= steps.double() * 0.500001).all())
    assert tensors["weight"].abs().max() == 127
    assert not tensors["weight"][:, 40:].any()


@pytest.mark.parametrize("scheme", FORMS)
def test_layout_is_what_is_packed(scheme: Int8Both) -> None:
    bias = torch.zeros(5, dtype=torch.float16)
    packed = scheme.pack(some(5, 200, torch.float16), bias, STEP if scheme.static else None)
    layout = scheme.layout(5, 200, True, torch.float16)
    assert [(n, t.shape, t.dtype) for n, t in packed.items()] == [
        (n, t.shape, t.dtype) for n, t in layout.items()
    ]
    assert layout["weight"].shape == (5, 208)
    assert ("input_scale" in packed) == scheme.static


@pytest.mark.parametrize("scheme", FORMS)
def test_a_row_has_the_same_bits_in_any_company(scheme: Int8Both) -> None:
    tensors = scheme.pack(some(50, 1200), torch.randn(50), STEP if scheme.static else None)
    x = torch.randn(33, 1200)
    together = scheme.apply(x, tensors)
    assert torch.equal(torch.cat([scheme.apply(x[i : i + 1], tensors) for i in range(33)]), together)
    assert scheme.batch_invariant() is scheme


def test_a_cpu_without_exact_products_widens_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Int8Both()
    tensors, x = scheme.pack(some(19, 64), torch.randn(19)), torch.randn(4, 64)
    whole = scheme.apply(x, tensors)
    monkeypatch.setattr(cpu_product, "exact_sums", lambda: False)
    monkeypatch.setattr(cpu_product, "PIECE", 5 * 64)
    assert torch.equal(scheme.apply(x, tensors), whole)


def test_products_get_a_view_with_aligned_rows() -> None:
    scheme = Int8Both()
    tensors = scheme.pack(some(6, 40), None)
    found = scheme.int8_weight(tensors, 40)
    assert (found.values.shape, found.values.stride()) == ((6, 40), (48, 1))
    assert found.values.data_ptr() == tensors["weight"].data_ptr()


@pytest.mark.parametrize("scale", [None, torch.zeros(1), torch.tensor([float("inf")])])
def test_a_static_scale_is_positive(scale: torch.Tensor | None) -> None:
    with pytest.raises(BuildError, match=r"positive scale from calibration.*calib"):
        Int8Both(static=True).pack(some(2, 16), None, scale)


def test_zeros_survive() -> None:
    scheme = Int8Both()
    tensors = scheme.pack(torch.zeros(3, 32), None)
    assert not scheme.apply(torch.zeros(2, 32), tensors).any()


def test_predicates_and_configs() -> None:
    scheme = make_scheme(QuantConfig("w8a8"), input_group=32)
    assert scheme == Int8Both(input_group=32)
    assert (scheme.form, scheme.dense, scheme.small_products) == ("int8", False, False)
    config = QuantConfig("w8a8", activations="static", weight_scales="tensor")
    assert make_scheme(config, input_group=32) == Int8Both(static=True, per_tensor=True)
    assert make_scheme(QuantConfig("w8a16")).form == "dense"


def test_scales_stay_fp32_in_a_narrow_model() -> None:
    linear = Linear.__new__(Linear)
    torch.nn.Module.__init__(linear)
    linear.scheme = Int8Both(static=True)
    kept = {leaf: loaded_dtype(linear, leaf, torch.float32, torch.float16) for leaf in ("scales", "bias")}
    assert kept == {"scales": torch.float32, "bias": torch.float16}
    assert loaded_dtype(linear, "weight", torch.int8, torch.float16) == torch.int8


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_outputs_are_the_paper_s(golden: Path, per_tensor: bool, static: bool) -> None:
    """Real int8 products against SmoothQuant's own fake quantization."""
    with np.load(golden / "quant" / "smoothquant_w8a8.npz", allow_pickle=False) as file:
        given = {part: torch.from_numpy(file[part]) for part in file.files}
    scheme, x = Int8Both(static=static, per_tensor=per_tensor), given["x"]
    step = x.abs().max() / 127 if static else None
    found = scheme.apply(x, scheme.pack(given["weight"], given["bias"], step))
    kinds = [
        "per_tensor" if on else other for on, other in ((per_tensor, "per_channel"), (static, "per_token"))
    ]
    expected = given["y_w_{}_a_{}".format(*kinds)]
    torch.testing.assert_close(found, expected.view_as(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("group", "step"), [(0, None), (16, None), (0, SMALL_STEP), (16, SMALL_STEP)])
def test_references_round_by_the_rule_of_the_kernels(
    group: int, step: torch.Tensor | None, dtype: torch.dtype
) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    near = rounded_rows(x.to(dtype), group, step)
    assert near.dtype == dtype
    expected = dequantize_rows(quantize_rows(x, 0 if step is not None else group, step))
    torch.testing.assert_close(near.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "step"), [(0, None), (16, None), (0, SMALL_STEP)])
def test_one_value_of_each_row_goes_the_other_way(group: int, step: torch.Tensor | None) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    plain, other = (rounded_rows(x, group, step, flips=flips) for flips in (False, True))
    differs = (plain - other).abs() > 1e-6
    assert differs.sum(-1).tolist() == [1] * 40
    worse = (other - x)[differs].abs() / (plain - x)[differs].abs()
    assert 1 < float(worse.max()) < 1.5  # the closest of 64 calls is close


def test_rows_of_zeros_stay() -> None:
    assert not rounded_rows(torch.zeros(3, 8), flips=True).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_of_16_bits_may_go_either_way(dtype: torch.dtype) -> None:
    """Half a row's largest magnitude is one, and more are where that is a multiple of 127."""
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[:, 7] = torch.where(torch.arange(2000) % 2 == 0, 11 / 256 * 127, x[:, 7].float()).to(dtype)
    plain, other = (rounded_rows(x.double(), flips=flips) for flips in (False, True))
    found = dequantize_rows(quantize_rows(x)).double()
    missed = (found - plain).abs() > 1e-4 * plain.abs().amax(1, keepdim=True)
    may = (other - plain).abs() > 1e-4 * plain.abs().amax(1, keepdim=True)
    assert int(missed.sum(1).max()) > 1
    assert not (missed & ~may).any()
    assert float(may.double().sum(1).mean()) < 20


def test_what_is_cut_never_goes_the_other_way() -> None:
    """However far beyond the last value it is."""
    x = torch.tensor([[0.3, 3e38, -torch.inf]], dtype=torch.float64)
    plain, other = (rounded_rows(x, scale=torch.ones(1), flips=flips) for flips in (False, True))
    assert plain.tolist() == [[0, 127, -128]]
    assert other.tolist() == [[1, 127, -128]]
