"""A plain MLP's up product of many rows with GELU inside: what takes it, and against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product import prompt_gate_up as module
from ingot.kernels.product.prompt_gate_up import LEAST_ROWS_UP, prompt_up, takes_up
from ingot.layers import layer_products
from ingot.layers.mlp import MLP
from ingot.layers.row_forms import DenseForm, Int8Form
from tests.kernels.numerics import normal
from tests.kernels.test_packed_matmul import HALF_DTYPES


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Against float64, within two roundings: of the sum, whose error GELU makes 1.13 times as large."""
    y = prompt_up(x, weight, bias)
    up = x.double() @ weight.double().t() + bias.double()
    true = up * (1 + torch.erf(up / 2**0.5)) / 2
    assert y.dtype == x.dtype
    limit = torch.finfo(x.dtype).eps * (0.6 * up.abs() + 0.6 * true.abs()) + 1e-5 * (up.abs() + 1)
    assert ((y.double() - true).abs() <= limit).all()
    return y


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_reference_is_the_formula(dtype: torch.dtype) -> None:
    x, weight = normal(7, 96, dtype=dtype), normal(512, 96, dtype=dtype, seed=1) / 8
    bias = normal(512, dtype=dtype, seed=2)
    assert check(x, weight, bias).shape == (7, 512)
    assert prompt_up(x[:0], weight, bias).shape == (0, 512)


def test_what_is_no_product() -> None:
    x, weight, bias = torch.ones(70, 64).half(), torch.ones(512, 64).half(), torch.ones(512).half()
    with pytest.raises(IngotError, match="weight has the wrong dtype"):
        prompt_up(x.float(), weight, bias)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        prompt_up(x[:, :63].contiguous(), weight, bias)
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        prompt_up(x, weight, bias[:256])
    with pytest.raises(IngotError, match="no whole tiles"):
        prompt_up(x, weight[:384], bias[:384])


def takes(rows: int, outputs: int = 5120, dtype: torch.dtype = torch.float16) -> bool:
    x = torch.empty(rows, 1400, dtype=dtype, device="meta")[:, :1280]
    return takes_up(x, torch.empty(outputs, 1280, dtype=dtype, device="meta"))


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that a descriptor reads, whole tiles of outputs, and programs with work to the end."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    assert not takes(12000)  # no GPU
    monkeypatch.setattr(module, "_hopper", lambda device: True)
    assert takes(12000)
    assert takes(12000, dtype=torch.bfloat16)
    assert not takes(12000, dtype=torch.float32)
    assert not takes(LEAST_ROWS_UP - 1, 256 * 132)
    assert takes(LEAST_ROWS_UP, 256 * 132)
    assert not takes(12000, 5120 + 128)
    assert not takes(128 * 27, 256 * 5)  # 135 tiles for 132 programs
    assert takes(6000)
    assert not takes(1500)  # a window of large-v3
    odd = torch.empty(12000, 1283, dtype=torch.float16, device="meta")
    assert not takes_up(odd[:, :1280], torch.empty(5120, 1280, dtype=torch.float16, device="meta"))


@pytest.mark.parametrize(("able", "activation", "called"), [(1, "gelu", 1), (0, "gelu", 0), (1, "relu", 0)])
def test_a_layer_takes_it(able: int, activation: str, called: int) -> None:
    """A dense up product with GELU, before a dense down product."""
    linear, mlp = mock.Mock(weight=torch.zeros(4, 4)), mock.Mock(spec=MLP, activation=activation)
    linear._parameters = {"bias": torch.zeros(4)}
    product, kernel = layer_products.BentProduct(linear), mock.Mock(return_value="inner")
    with mock.patch.multiple(layer_products, takes_up=lambda x, w: able, prompt_up=kernel):
        product.inner(torch.zeros(2, 4), mlp, DenseForm())
        narrow = mock.Mock(spec=Int8Form)
        product.inner(torch.zeros(2, 4), mlp, narrow)
    assert kernel.call_count == called
    assert narrow.activation.call_count == 1
    assert mlp.activate.call_count == 1 - called


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.usefixtures("poisoned_allocations")
def test_equal_to_float64(dtype: torch.dtype) -> None:
    """One tile, many per program, ends of rows and columns; the same bits again and in another place."""
    for rows, outputs, width in ((1, 256, 64), (257, 768, 520), (3000, 5120, 1280), (2500, 28672, 512)):
        x = normal(rows, width + 8, dtype=dtype, device="cuda")[:, 8:]
        weight = normal(outputs, width, dtype=dtype, device="cuda", seed=1) / width**0.5
        bias = normal(outputs, dtype=dtype, device="cuda", seed=2)
        y = check(x, weight, bias)
        assert torch.equal(y, prompt_up(x, weight, bias))
        if rows > 200:
            assert torch.equal(y[100:], prompt_up(x[100:], weight, bias))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
def test_gelu_of_every_value() -> None:
    """All of fp16 as a bias to sums of 0: as near to GELU as one rounding allows, infinite or NaN alike."""
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").short().view(torch.float16)
    y = prompt_up(
        torch.zeros(3, 64, device="cuda").half(), torch.ones(1 << 16, 64, device="cuda").half(), every
    )
    wide = every.double()
    true = wide * torch.erfc(-wide / 2**0.5) / 2
    finite = every.isfinite()
    limit = 0.51 * torch.finfo(torch.float16).eps * true.abs() + 1e-7
    assert ((y[2].double() - true).abs() <= limit)[finite].all()
    theirs = torch.nn.functional.gelu(every[~finite].float())
    assert torch.equal(y[2][~finite].float().nan_to_num(7, 8, 9), theirs.nan_to_num(7, 8, 9))
