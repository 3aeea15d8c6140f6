"""The gate and up product, or a plain MLP's up product, of many rows with its activation: what takes it, and
against float64.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product import prompt_gate_up as module
from ingot.kernels.product.prompt_gate_up import (
    LEAST_ROWS,
    LEAST_ROWS_TALL,
    LEAST_ROWS_UP,
    SHORT,
    TALL,
    THREE,
    TWO,
    prompt_gate_up,
    prompt_up,
    takes_gate_up,
    takes_up,
    tall_tiles,
)
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.products import layer_products
from ingot.layers.products.row_forms import DenseForm, Int8Form
from tests.kernels.numerics import normal
from tests.kernels.test_packed_matmul import HALF_DTYPES

BOTH = pytest.mark.parametrize("plain", [False, True], ids=["gate and up", "up"])
HOPPERS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, plain: bool) -> torch.Tensor:
    return prompt_up(x, weight, bias) if plain else prompt_gate_up(x, weight)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, plain: bool) -> torch.Tensor:
    """Against float64, within four roundings: of both sums, activation and result. Of a plain MLP two:
    of the sum, whose error GELU makes 1.13 times as large, and of the result.
    """
    y, sums, eps = product(x, weight, bias, plain), x.double() @ weight.double().t(), torch.finfo(x.dtype).eps
    if plain:
        sums += bias.double()
        true = sums * (1 + torch.erf(sums / 2**0.5)) / 2
        limit = eps * (0.6 * sums.abs() + 0.6 * true.abs()) + 1e-5 * (sums.abs() + 1)
    else:
        gate, up = sums.chunk(2, dim=-1)
        true = gate / (1 + torch.exp(-gate)) * up
        limit = 2.2 * eps * (gate * up).abs() + 1e-5 * (gate.abs() + up.abs() + 1)
    assert y.dtype == x.dtype
    assert ((y.double() - true).abs() <= limit).all()
    return y


@BOTH
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_reference_is_the_formula(dtype: torch.dtype, plain: bool) -> None:
    x, weight = normal(7, 96, dtype=dtype), normal(512, 96, dtype=dtype, seed=1) / 8
    bias = normal(512, dtype=dtype, seed=2)
    assert check(x, weight, bias, plain).shape == (7, 512 if plain else 256)
    assert product(x[:0], weight, bias, plain).shape == (0, 512 if plain else 256)


@BOTH
def test_what_is_no_product(plain: bool) -> None:
    x, weight, bias = torch.ones(70, 64).half(), torch.ones(512, 64).half(), torch.ones(512).half()
    with pytest.raises(IngotError, match="weight has the wrong dtype"):
        product(x.float(), weight, bias, plain)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        product(x[:, :63].contiguous(), weight, bias, plain)
    with pytest.raises(IngotError, match="no whole tiles"):
        product(x, weight[:384], bias[:384], plain)
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        prompt_up(x, weight, bias[:256])


def takes(rows: int, outputs: int = 28672, dtype: torch.dtype = torch.bfloat16) -> bool:
    x = torch.empty(rows, 4200, dtype=dtype, device="meta")[:, :4096]
    return takes_gate_up(x, torch.empty(outputs, 4096, dtype=dtype, device="meta"))


def takes_plain(rows: int, outputs: int = 5120, dtype: torch.dtype = torch.float16) -> bool:
    x = torch.empty(rows, 1400, dtype=dtype, device="meta")[:, :1280]
    return takes_up(x, torch.empty(outputs, 1280, dtype=dtype, device="meta"))


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that a descriptor reads, whole tiles of outputs, and programs with work to the end."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "is_hopper", lambda device: False)
    assert not takes(2048)
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    assert [rows for rows in (512, 768, 1023, 1024, 1536, 2048, 2176, 8192) if takes(rows)] == [
        1024, 2048, 2176, 8192,
    ]  # fmt: skip
    few = [rows for rows in (64, 95, 96, 128, 129, 192, 239, 240, 256, 257) if takes(rows)]
    assert few == [96, 128, 240, 256]
    assert not takes(128, 24576), "too few tiles for the programs"
    assert not takes(LEAST_ROWS - 1, 2 * 128 * 132)
    assert takes(LEAST_ROWS, 2 * 128 * 132)
    assert not takes(2048, 28672 + 128)
    assert not any(takes(rows, dtype=torch.float16) for rows in (96, 128, 240, 2048))
    odd = torch.empty(2048, 4099, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    assert not takes_gate_up(odd[:, :4096], weight)
    assert not takes_gate_up(torch.empty(2048, 4096, dtype=torch.bfloat16, device="meta"), odd[:, :4096])


def test_what_the_kernel_takes_of_a_plain_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a product with GELU."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "is_hopper", lambda device: False)
    assert not takes_plain(12000)
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    assert takes_plain(12000)
    assert takes_plain(12000, dtype=torch.bfloat16)
    assert not takes_plain(12000, dtype=torch.float32)
    assert not takes_plain(LEAST_ROWS_UP - 1, 256 * 132)
    assert takes_plain(LEAST_ROWS_UP, 256 * 132)
    assert not takes_plain(12000, 5120 + 128)
    assert not takes_plain(128 * 27, 256 * 5)  # 135 tiles for 132 programs
    assert takes_plain(6000)
    assert not takes_plain(1500)  # a window of large-v3
    odd = torch.empty(12000, 1283, dtype=torch.float16, device="meta")
    assert not takes_up(odd[:, :1280], torch.empty(5120, 1280, dtype=torch.float16, device="meta"))


@pytest.mark.parametrize(
    ("kind", "mlp_of", "names"),
    [
        (layer_products.GatedProduct, GatedMLP, ("takes_gate_up", "prompt_gate_up")),
        (layer_products.BentProduct, MLP, ("takes_up", "prompt_up")),
    ],
)
@pytest.mark.parametrize("case", [(1, True, 1), (0, True, 0), (1, False, 0)])
def test_a_layer_takes_it(
    kind: Any, mlp_of: Any, names: tuple[str, str], case: tuple[int, bool, int]
) -> None:
    """A dense product with SiLU or GELU, before a dense down product."""
    able, own, called = case
    activation = {GatedMLP: ("gelu_tanh", "silu"), MLP: ("relu", "gelu")}[mlp_of][own]
    linear, mlp = mock.Mock(weight=torch.zeros(4, 4)), mock.Mock(spec=mlp_of, activation=activation)
    linear._parameters = {"bias": torch.zeros(4)}
    layer, kernel = kind(linear), mock.Mock(return_value="inner")
    with mock.patch.multiple(layer_products, **{names[0]: lambda x, w: able, names[1]: kernel}):
        layer.inner(torch.zeros(2, 4), mlp, DenseForm())
        narrow = mock.Mock(spec=Int8Form)
        layer.inner(torch.zeros(2, 4), mlp, narrow)
    assert kernel.call_count == called
    assert narrow.activation.call_count == 1
    assert mlp.activate.call_count == 1 - called


def ends(tall: int, rows: int, across: int, programs: int) -> int:
    """When the last program ends, by handing out tile after tile."""
    short = -(-max(rows - 192 * tall, 0) // 128)
    times = [TALL] * (tall * across) + [SHORT] * (short * across)
    return max(sum(times[first::programs]) for first in range(programs))


@pytest.mark.parametrize("rows", [1, 128, 129, 1900, 2048, 4100])
@pytest.mark.parametrize("across", [3, 16, 24, 112])
def test_no_other_tiles_end_earlier(rows: int, across: int) -> None:
    every = {tall: ends(tall, rows, across, 132) for tall in range(-(-rows // 192) + 1)}
    assert every[tall_tiles(rows, across, 132)] == min(every.values())


def launches(rows: int, plain: bool) -> dict[str, Any]:
    """How the kernel is launched: programs, tiles of 192 rows, and its constants."""
    x, weight, bias = (torch.empty(*size, dtype=torch.bfloat16) for size in ((rows, 64), (5632, 64), (5632,)))
    kernel = mock.MagicMock()
    with (
        mock.patch.multiple(module, prompt_gate_up_kernel=kernel, descriptor=mock.Mock()),
        mock.patch.multiple(module, multiprocessors=lambda d: 132, runs_on_gpu=lambda x: True),
    ):
        assert product(x, weight, bias, plain).shape == (rows, 5632 if plain else 2816)
    (grid,), arguments = kernel.__getitem__.call_args.args[0], kernel.__getitem__().call_args
    return {"programs": grid, "tall": arguments.args[-1], "loop": arguments.kwargs["LOOP"]}


def test_many_rows_of_gate_and_up_have_three_groups() -> None:
    """In tiles of 192 rows but the last, so that 132 programs end early."""
    assert launches(LEAST_ROWS_TALL - 1, False) == {"programs": 132, "tall": 32, "loop": TWO}
    assert launches(LEAST_ROWS_TALL, False) == {"programs": 132, "tall": 18, "loop": THREE}
    assert launches(LEAST_ROWS_TALL, True) == {"programs": 132, "tall": 32, "loop": TWO}
    assert launches(300, False) == {"programs": 66, "tall": 3, "loop": TWO}


@BOTH
@pytest.mark.gpu
@HOPPERS
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.usefixtures("poisoned_allocations")
def test_equal_to_float64(dtype: torch.dtype, plain: bool) -> None:
    """One tile, many per program, ends of rows and columns; the same bits again, in another place and by
    another number of groups.
    """
    shapes = ((1, 256, 64), (257, 768, 520), (3000, 4096, 1024), (3000, 5120, 1280), (2500, 28672, 512))
    shapes += (
        (5000, 5632, 512),
        (4097, 24576, 256),
        (8192, 4096, 1000),
    )  # three groups, tiles of both heights
    for rows, outputs, width in shapes:
        x = normal(rows, width + 8, dtype=dtype, device="cuda")[:, 8:]
        weight = normal(outputs, width, dtype=dtype, device="cuda", seed=1) / width**0.5
        bias = normal(outputs, dtype=dtype, device="cuda", seed=2)
        y = check(x, weight, bias, plain)
        assert torch.equal(y, product(x, weight, bias, plain))
        if rows > 200:
            assert torch.equal(y[100:], product(x[100:], weight, bias, plain))
            assert torch.equal(y[-2000:], product(x[-2000:], weight, bias, plain))


@pytest.mark.gpu
@HOPPERS
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
