"""RMSNorm and LayerNorm against float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ingot.errors import IngotError
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

EPS = 1e-5
SHAPES = [(0, 8), (1, 1), (3, 7), (5, 96), (2, 1000), (1, 4096)]


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], with_residual: bool
) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device)
    weight = normal(shape[1], dtype=dtype, device=impl.device, seed=1)
    residual = normal(*shape, dtype=dtype, device=impl.device, seed=2) if with_residual else None
    y, new_residual = impl(rms_norm)(x, weight, EPS, residual)
    s = x if residual is None else x + residual
    wide = s.double()
    expected = wide / torch.sqrt((wide**2).mean(dim=1, keepdim=True) + EPS) * weight.double()
    assert_near(y, expected)
    assert torch.equal(new_residual, s)
    assert (new_residual is x) == (residual is None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 2e-2), (torch.bfloat16, 8e-2)]
)
def test_rms_norm_at_a_7b_models_width(device: str, dtype: torch.dtype, limit: float) -> None:
    """8 sequences of 128 tokens with 4096 channels: every value within an absolute limit of float64."""
    x = normal(8 * 128, 4096, dtype=torch.float32).to(device=device, dtype=dtype)
    weight = (1 + 0.1 * normal(4096, dtype=torch.float32, seed=1)).to(device=device, dtype=dtype)
    y, _ = rms_norm(x, weight, EPS)
    wide = x.double()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)  # sqrt(4096 * mean of the squares)
    expected = wide * 64 / torch.sqrt(length**2 + 4096 * EPS) * weight.double()
    assert (y.dtype, y.shape) == (dtype, (8 * 128, 4096))
    assert (y.double() - expected).abs().max() <= limit


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int], with_residual: bool
) -> None:
    x = normal(*shape, dtype=dtype, device=impl.device) + 3
    weight = normal(shape[1], dtype=dtype, device=impl.device, seed=1)
    bias = normal(shape[1], dtype=dtype, device=impl.device, seed=2)
    residual = normal(*shape, dtype=dtype, device=impl.device, seed=3) if with_residual else None
    y, new_residual = impl(layer_norm)(x, weight, bias, EPS, residual)
    s = x if residual is None else x + residual
    wide = s.double()
    centred = wide - wide.mean(dim=1, keepdim=True)
    expected = centred / torch.sqrt((centred**2).mean(dim=1, keepdim=True) + EPS) * weight.double()
    assert_near(y, expected + bias.double())
    assert torch.equal(new_residual, s)
    assert (new_residual is x) == (residual is None)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight(impl: Implementation, dtype: torch.dtype) -> None:
    """Bit by bit the order of Hugging Face's norms: normalise in fp32, round, multiply, round again."""
    x = normal(16, 64, dtype=dtype, device=impl.device)
    norm = LlamaRMSNorm(64, EPS).to(x)
    norm.weight.data = weight = normal(64, dtype=dtype, device=impl.device, seed=1)
    y, _ = impl(rms_norm)(x, weight, EPS)
    expected = norm(x)
    same = float((y == expected).float().mean())
    assert (
        same == 1 if impl.device == "cpu" and not impl.interpreted else same > 0.99
    )  # sums in another order


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_of_a_wider_tensor(impl: Implementation) -> None:
    wide = normal(4, 100, dtype=torch.float32, device=impl.device)
    weight = normal(48, dtype=torch.float32, device=impl.device, seed=1)
    x, residual = wide[:, :48], wide[:, 50:98]
    y, new_residual = impl(rms_norm)(x, weight, EPS, residual)
    expected, _ = rms_norm(x.cpu().contiguous(), weight.cpu(), EPS, residual.cpu().contiguous())
    assert_near(y.cpu(), expected.double())
    assert torch.equal(new_residual, x + residual)


def test_tiles_change_nothing_but_speed() -> None:
    x, weight = normal(2, 64, dtype=torch.float32), normal(64, dtype=torch.float32)
    assert torch.equal(rms_norm(x, weight, EPS, tiles={"num_warps": 2})[0], rms_norm(x, weight, EPS)[0])


@pytest.mark.parametrize(
    ("x", "weight", "residual", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4), None, "x has the wrong dtype"),
        (torch.zeros(2, 4), torch.zeros(5), None, "weight has the wrong shape"),
        (torch.zeros(2, 4), torch.zeros(4).half(), None, "weight has the wrong dtype"),
        (torch.zeros(4), torch.zeros(4), None, "x has the wrong shape"),
        (torch.zeros(4, 2).T, torch.zeros(4), None, "x is not contiguous"),
        (torch.zeros(2, 4), torch.zeros(4), torch.zeros(3, 4), "residual has the wrong shape"),
        (torch.zeros(2, 4), torch.zeros(4, device="meta"), None, "weight is on another device"),
        (torch.zeros(1, 16385), torch.zeros(16385), None, "the hidden size is out of range"),
        (torch.zeros(2, 4, device="meta"), torch.zeros(4, device="meta"), None, "no kernel for this device"),
    ],
)
def test_refused(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, message: str) -> None:
    with pytest.raises(IngotError, match=message):
        rms_norm(x, weight, EPS, residual)
    with pytest.raises(IngotError, match=message):
        layer_norm(x, weight, weight, EPS, residual)
