"""What w8a8-fp8 stores, means and computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.engine_loader import expect_schemes
from ingot.errors import BuildError, ConfigError, DeviceError
from ingot.kernels.product.int8 import cpu_product
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows
from ingot.layers.linear import Linear, loaded_dtype
from ingot.quant.plain_rows import rounded_e4m3
from ingot.quant.schemes.fp8_both import Fp8Both
from ingot.quant.schemes.scheme_registry import make_scheme
from tests.kernels.plain_e4m3 import TABLE, bits_of, encoded, plain
from tests.support.shown_errors import raises_shown

FORMS = [Fp8Both(), Fp8Both(per_tensor=True)]


def some(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def quantized_input(x: torch.Tensor, group: int) -> torch.Tensor:
    """What NumPy makes of an input [M, K]: rounded by rows, or groups, to e4m3, and widened, fp64."""
    pieces = x.numpy().reshape(len(x), -1, group or x.shape[1])
    most = np.maximum(np.abs(pieces).max(-1, keepdims=True), np.float32(1e-10))
    values = TABLE[encoded((pieces * (np.float32(448) / most)).astype(np.float64))]
    return torch.from_numpy((values * (most / np.float32(448)).astype(np.float64)).reshape(x.shape))


@pytest.mark.parametrize("scheme", FORMS)
@pytest.mark.parametrize("columns", [40, 64, 4096])
def test_the_product_is_that_of_what_the_values_mean(scheme: Fp8Both, columns: int) -> None:
    weight, bias, x = some(19, columns), some(19, 1)[:, 0], some(6, columns)
    tensors = scheme.pack(weight, bias)
    meant = plain(tensors["weight"])[:, :columns] * tensors["scales"].double()[:, None]
    expected = quantized_input(x, scheme.input_group) @ meant.T + bias
    found = scheme.apply(x.view(2, 3, columns), tensors)
    assert found.shape == (2, 3, 19)
    torch.testing.assert_close(found.view(6, 19).double(), expected, rtol=1e-4, atol=1e-4 * columns**0.5)
    whole = torch.nn.functional.linear(x, weight, bias)
    assert 0.01 < float((found.view(6, 19) - whole).norm() / whole.norm()) < 0.06


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_values_are_the_nearest(dtype: torch.dtype, per_tensor: bool) -> None:
    scheme, weight = Fp8Both(per_tensor=per_tensor), some(7, 40, dtype)
    tensors = scheme.pack(weight, None)
    wide = weight.double().numpy()
    peak = np.abs(wide).max(None if per_tensor else 1, keepdims=True)
    scales = np.broadcast_to(peak / 448, (7, 1)).astype(np.float32)
    np.testing.assert_allclose(tensors["scales"].numpy(), scales[:, 0], rtol=2e-7)
    near = encoded(wide / tensors["scales"].double().numpy()[:, None])
    assert (TABLE[near] != TABLE[bits_of(tensors["weight"])[:, :40]]).mean() < 0.01
    assert float(plain(tensors["weight"]).abs().max()) == 448
    assert not bits_of(tensors["weight"])[:, 40:].any()


@pytest.mark.parametrize("scheme", FORMS)
def test_layout_is_what_is_packed(scheme: Fp8Both) -> None:
    packed = scheme.pack(some(5, 200, torch.float16), torch.zeros(5, dtype=torch.float16))
    layout = scheme.layout(5, 200, True, torch.float16)
    assert [(n, t.shape, t.dtype) for n, t in packed.items()] == [
        (n, t.shape, t.dtype) for n, t in layout.items()
    ]
    assert (layout["weight"].shape, layout["weight"].dtype) == ((5, 208), E4M3)


@pytest.mark.parametrize("scheme", FORMS)
def test_a_row_has_the_same_bits_beside_any_others(scheme: Fp8Both) -> None:
    invariant = scheme.batch_invariant()
    tensors, x = scheme.pack(some(50, 1200), some(50, 1)[:, 0]), some(33, 1200)
    together = invariant.apply(x, tensors)
    assert torch.equal(torch.cat([invariant.apply(x[i : i + 1], tensors) for i in range(33)]), together)
    torch.testing.assert_close(together, scheme.apply(x, tensors), rtol=1e-4, atol=1e-4)
    assert (invariant.name, invariant.batch_invariant()) == (scheme.name, invariant)


def test_a_cpu_widens_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Fp8Both()
    tensors, x = scheme.pack(some(19, 64), some(19, 1)[:, 0]), some(4, 64)
    whole, widened = scheme.apply(x, tensors), cpu_product.int8_product
    rows: list[int] = []

    def seen(x: Int8Rows, piece: Any, *given: Any) -> torch.Tensor:
        rows.append(len(piece.values))
        return widened(x, piece, *given)

    monkeypatch.setattr(cpu_product, "PIECE", 5 * 64)
    monkeypatch.setattr(cpu_product, "int8_product", seen)
    torch.testing.assert_close(scheme.apply(x, tensors), whole, rtol=1e-6, atol=1e-6)
    assert rows == [5, 5, 5, 4]


def test_products_get_a_view_with_aligned_rows() -> None:
    scheme = Fp8Both()
    tensors = scheme.pack(some(6, 40), None)
    found = scheme.int8_weight(tensors, 40)
    assert (found.values.shape, found.values.stride()) == ((6, 40), (48, 1))
    assert found.values.data_ptr() == tensors["weight"].data_ptr()


def test_zeros_survive() -> None:
    scheme, weight = Fp8Both(), some(3, 32)
    weight[1] = 0
    tensors = scheme.pack(weight, None)
    assert float(tensors["scales"][1]) == 1
    y = scheme.apply(some(2, 32), tensors)
    assert not y[:, 1].any()
    assert not scheme.apply(torch.zeros(2, 32), tensors).any()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(odd: float) -> None:
    weight = some(3, 32)
    weight[1, 5] = odd
    with pytest.raises(BuildError, match=r"not finite.*row 1, column 5"):
        Fp8Both().pack(weight)


def test_an_input_that_is_not_finite_stays_in_its_row() -> None:
    scheme, x = Fp8Both(), some(3, 32)
    tensors = scheme.pack(some(5, 32), None)
    whole = scheme.apply(x, tensors)
    x[1, 3] = float("inf")
    y = scheme.apply(x, tensors)
    assert torch.equal(y[[0, 2]], whole[[0, 2]])
    assert not y[1].isfinite().any()


def test_steps_of_an_input_are_the_gaps_on_its_side() -> None:
    """Below a power of two values are half as far apart as above it."""
    values = torch.tensor([[16.0, 16.0, -16.0, 17.0, 2.0**-8]]).to(E4M3)
    rows, like = Int8Rows(values, torch.tensor([0.5])), torch.tensor([[7.8, 8.4, -7.8, 8.4, 0.003]])
    wide, steps = Fp8Both().dequantize_input(rows, {}, like)
    assert wide.tolist() == [[8, 8, -8, 8, 2.0**-9]]
    assert steps.tolist() == [[0.5, 1, 0.5, 1, 2.0**-10]]


def test_predicates_and_configs() -> None:
    scheme = make_scheme(QuantConfig("w8a8-fp8"), input_group=32)
    assert scheme == Fp8Both()  # attention's output has a scale per token, too
    assert (scheme.form, scheme.dense, scheme.small_products, scheme.static) == ("int8", False, False, False)
    assert make_scheme(QuantConfig("w8a8-fp8", weight_scales="tensor")) == Fp8Both(per_tensor=True)
    assert QuantConfig("w8a8-fp8").summary == "w8a8-fp8, dynamic activations, by rounding"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activations": "static"}, "activations.*static.*dynamic"),
        ({"method": "smoothquant"}, "method.*smoothquant.*round"),
        ({"group": 32}, "group"),
    ],
)
def test_what_it_does_not_have(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        QuantConfig("w8a8-fp8", **fields)


def test_values_and_scales_keep_their_dtypes_in_a_narrow_model() -> None:
    linear = Linear.__new__(Linear)
    torch.nn.Module.__init__(linear)
    linear.scheme = Fp8Both()
    stored = {"weight": E4M3, "scales": torch.float32, "bias": torch.float32}
    kept = {leaf: loaded_dtype(linear, leaf, dtype, torch.float16) for leaf, dtype in stored.items()}
    assert kept == stored | {"bias": torch.float16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [0, 16])
def test_references_round_by_the_rule_of_the_kernels(group: int, dtype: torch.dtype) -> None:
    x = some(40, 64)
    near = rounded_e4m3(x.to(dtype), group)
    expected = quantized_input(x, group)
    off = (near.double() - expected).abs() > 1e-6 * expected.abs()
    assert near.dtype == dtype
    assert float(off.double().mean()) < 1e-3
    flipped = rounded_e4m3(x.to(dtype), group, flips=True)
    assert bool((flipped != near).any(-1).all())


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    gpu, mixed = torch.device("cuda", 0), QuantConfig("w8a16", layers={"*.down_proj": "w8a8-fp8"})
    expect_schemes(mixed, torch.device("cpu"))
    expect_schemes(QuantConfig("w8a8"), gpu)
    for quant in (mixed, QuantConfig("w8a8-fp8")):
        with raises_shown(DeviceError, r"fp8 products \(w8a8-fp8\).*8\.6; allowed: 8\.9.*--quant w8a8"):
            expect_schemes(quant, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    expect_schemes(mixed, gpu)
