"""The gate and up product of many rows with its activation: what takes it, and against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product import prompt_gate_up as module
from ingot.kernels.product.prompt_gate_up import LEAST_ROWS, prompt_gate_up, takes_gate_up
from ingot.layers import layer_products
from ingot.layers.mlp import GatedMLP
from ingot.layers.row_forms import DenseForm, Int8Form
from tests.kernels.numerics import normal
from tests.kernels.test_packed_matmul import HALF_DTYPES


def check(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Against float64, within four roundings: of both sums, the activation and the result."""
    y = prompt_gate_up(x, weight)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    true = gate / (1 + torch.exp(-gate)) * up
    assert y.dtype == x.dtype
    limit = 2.2 * torch.finfo(x.dtype).eps * (gate * up).abs() + 1e-5 * (gate.abs() + up.abs() + 1)
    assert ((y.double() - true).abs() <= limit).all()
    return y


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_reference_is_the_formula(dtype: torch.dtype) -> None:
    x, weight = normal(7, 96, dtype=dtype), normal(512, 96, dtype=dtype, seed=1) / 8
    assert check(x, weight).shape == (7, 256)
    assert prompt_gate_up(x[:0], weight).shape == (0, 256)


def test_what_is_no_product() -> None:
    weight = torch.ones(256, 64).half()
    with pytest.raises(IngotError, match="weight has the wrong dtype"):
        prompt_gate_up(torch.ones(70, 64), weight)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        prompt_gate_up(torch.ones(70, 63).half(), weight)
    with pytest.raises(IngotError, match="no whole tiles"):
        prompt_gate_up(torch.ones(70, 64).half(), weight[:254])


def takes(rows: int, outputs: int = 28672, dtype: torch.dtype = torch.bfloat16) -> bool:
    x = torch.empty(rows, 4200, dtype=dtype, device="meta")[:, :4096]
    return takes_gate_up(x, torch.empty(outputs, 4096, dtype=dtype, device="meta"))


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that a descriptor reads, whole tiles of outputs, and programs with work to the end."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    assert not takes(2048)  # no GPU
    monkeypatch.setattr(module, "_hopper", lambda device: True)
    assert [rows for rows in (512, 768, 1023, 1024, 1536, 2048, 2176, 8192) if takes(rows)] == [
        1024, 2048, 2176, 8192,
    ]  # fmt: skip
    assert not takes(LEAST_ROWS - 1, 2 * 128 * 132)
    assert takes(LEAST_ROWS, 2 * 128 * 132)
    assert not takes(2048, 28672 + 128)
    assert not takes(2048, dtype=torch.float16)
    odd = torch.empty(2048, 4099, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    assert not takes_gate_up(odd[:, :4096], weight)
    assert not takes_gate_up(torch.empty(2048, 4096, dtype=torch.bfloat16, device="meta"), odd[:, :4096])


@pytest.mark.parametrize(
    ("able", "activation", "called"), [(1, "silu", 1), (0, "silu", 0), (1, "gelu_tanh", 0)]
)
def test_a_layer_takes_it(able: int, activation: str, called: int) -> None:
    """A dense gate and up product with SiLU, before a dense down product."""
    linear, mlp = mock.Mock(weight=torch.zeros(4, 4)), mock.Mock(spec=GatedMLP, activation=activation)
    product, kernel = layer_products.GatedProduct(linear), mock.Mock(return_value="inner")
    with mock.patch.multiple(layer_products, takes_gate_up=lambda x, w: able, prompt_gate_up=kernel):
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
    for rows, outputs, width in ((1, 256, 64), (257, 768, 520), (3000, 4096, 1024), (2500, 28672, 512)):
        x = normal(rows, width + 8, dtype=dtype, device="cuda")[:, 8:]
        weight = normal(outputs, width, dtype=dtype, device="cuda", seed=1) / width**0.5
        y = check(x, weight)
        assert torch.equal(y, prompt_gate_up(x, weight))
        if rows > 200:
            assert torch.equal(y[100:], prompt_gate_up(x[100:], weight))
