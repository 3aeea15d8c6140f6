"""Rows in e4m3: every kernel that ends in them, against NumPy's reading of the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.activation.silu_mul_int8 import quantized, silu_mul_int8
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, dequantize_rows, quantize_rows
from ingot.kernels.rows.row_endings import InInt8
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal
from tests.kernels.plain_e4m3 import NAN, TABLE, bits_of, encoded, plain

MOST = np.float32(448)


def expected(x: torch.Tensor, group: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [M, K] and fp32 scales [M, groups] of rows, step by step as int8_rows.py describes the rule."""
    wide = x.float().cpu().numpy()
    pieces = wide.reshape(len(wide), -1, group or wide.shape[1])
    most = np.maximum(np.abs(pieces).max(-1, keepdims=True), np.float32(1e-10))
    scaled = pieces * (np.float32(1) / most * MOST)
    return encoded(scaled.astype(np.float64)).reshape(wide.shape), (most / MOST)[..., 0]


def assert_rows(rows: Int8Rows, x: torch.Tensor, group: int = 0) -> None:
    """Bytes and scales of x; a value one step off only where the inverse's last bit decides."""
    bits, scales = expected(x, group)
    assert rows.values.dtype == E4M3
    assert rows.group == group
    np.testing.assert_array_equal(rows.scales.cpu().numpy().reshape(scales.shape), scales)
    got = bits_of(rows.values)
    assert not (got & NAN == NAN).any()
    off = TABLE[got] != TABLE[bits]
    assert off.mean() < 1e-3
    near = TABLE[got[off]] / TABLE[bits[off]]
    assert ((near >= 0.875) & (near <= 1 / 0.875)).all()


def test_the_table_is_pytorchs() -> None:
    """PyTorch's own cast, whose values are in no kernel's hands."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3)
    np.testing.assert_array_equal(values.double().numpy(), TABLE)
    size = torch.linspace(-460, 460, 4001).clamp(-448, 448)
    np.testing.assert_array_equal(encoded(size.double().numpy()), bits_of(size.to(E4M3)))


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 96), (2, 1000)])
def test_quantized(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device) * 3
    assert_rows(impl(quantized)(x, dtype=E4M3), x)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("group", [16, 24])
def test_quantized_in_groups(impl: Implementation, group: int) -> None:
    x = normal(5, 48, dtype=torch.float16, device=impl.device)
    assert_rows(impl(quantized)(x, group, dtype=E4M3), x, group)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_size_of_value(impl: Implementation) -> None:
    """From below the least value to the largest, with ties between all neighbours."""
    middles = (TABLE[: NAN - 1] + TABLE[1:NAN]) / 2
    x = torch.from_numpy(np.concatenate([TABLE[:NAN], middles, -middles, [448.0]])).float()[None]
    rows = impl(quantized)(x.to(impl.device), dtype=E4M3)
    assert float(rows.scales) == 1.0
    np.testing.assert_array_equal(TABLE[bits_of(rows.values)], TABLE[encoded(x.double().numpy())])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_norms_and_activations_end_in_e4m3(impl: Implementation) -> None:
    x, ending = normal(4, 96, dtype=torch.bfloat16, device=impl.device), InInt8(dtype=E4M3)
    weight = normal(96, dtype=torch.bfloat16, device=impl.device, seed=1)
    rows, hidden = impl(rms_norm)(x, weight, 1e-6, x, ending=ending)
    plain_rows, plain_hidden = impl(rms_norm)(x, weight, 1e-6, x)
    assert torch.equal(hidden, plain_hidden)
    assert_rows(rows, plain_rows)
    parts = normal(2, 4, 96, dtype=torch.float32, device=impl.device, seed=2)
    rows, _ = impl(sum_norm)(parts, x, weight, 1e-6, ending=ending)
    assert_rows(rows, impl(sum_norm)(parts, x, weight, 1e-6)[0])
    for inner in (48, 40):
        gate_up = normal(4, 2 * inner, dtype=torch.bfloat16, device=impl.device, seed=3)
        assert_rows(impl(silu_mul_int8)(gate_up, dtype=E4M3), impl(silu_mul)(gate_up))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_zeros_stay_zeros(impl: Implementation) -> None:
    rows = impl(quantized)(torch.zeros(2, 40, dtype=torch.float16, device=impl.device), dtype=E4M3)
    assert not bits_of(rows.values).any()
    assert bool((rows.scales > 0).all())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_given_scale_saturates(impl: Implementation) -> None:
    x = torch.tensor([[0.0, 1.0, 447.0, 449.0, 470.0, 1e30, -463.0, -1e30]], device=impl.device)
    rows = impl(quantized)(x, static=torch.ones(1, device=impl.device), dtype=E4M3)
    np.testing.assert_array_equal(TABLE[bits_of(rows.values)], [[0, 1, 448, 448, 448, 448, -448, -448]])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan")])
def test_no_value_is_nan(impl: Implementation, odd: float) -> None:
    """The row's scale says what the row is, as in int8; the other rows stay as they are."""
    x = normal(3, 40, dtype=torch.float32, device=impl.device)
    x[1, 7] = odd
    rows, beside = impl(quantized)(x, dtype=E4M3), impl(quantized)(x)
    assert not (bits_of(rows.values) & NAN == NAN).any()
    assert bool(rows.scales[1].isfinite()) == bool(beside.scales[1].isfinite())
    assert_rows(Int8Rows(rows.values[[0, 2]], rows.scales[[0, 2]]), x[[0, 2]])


def test_rows_mean_their_values() -> None:
    rows = quantize_rows(normal(4, 64, dtype=torch.float32), 16, dtype=E4M3)
    meant = plain(rows.values).view(4, 4, 16) * rows.scales.double()[..., None]
    torch.testing.assert_close(dequantize_rows(rows).double(), meant.flatten(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_norms_and_activations_end_in_groups(impl: Implementation) -> None:
    """128 columns share a scale, in widths that are no powers of two."""
    x = normal(3, 384, dtype=torch.bfloat16, device=impl.device) * 3
    weight = normal(384, dtype=torch.bfloat16, device=impl.device, seed=2)
    rows, _ = impl(rms_norm)(x, weight, 1e-6, ending=InInt8(dtype=E4M3, group=128))
    assert_rows(rows, impl(rms_norm)(x, weight, 1e-6)[0], 128)
    wide = normal(3, 768, dtype=torch.bfloat16, device=impl.device)
    assert_rows(impl(silu_mul_int8)(wide, dtype=E4M3, group=128), impl(silu_mul)(wide), 128)
