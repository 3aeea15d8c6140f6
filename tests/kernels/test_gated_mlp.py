"""silu(gate) * up against float64."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import Gate, silu_mul
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, launched, normal


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 11), (2, 1500), (5, 64)])
def test_silu_mul(impl: Implementation, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, inner = shape
    gate_up = normal(rows, 2 * inner, dtype=dtype, device=impl.device) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(impl(silu_mul)(gate_up), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gelu_gate(impl: Implementation, dtype: torch.dtype) -> None:
    gate_up = normal(3, 600, dtype=dtype, device=impl.device) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    y = impl(silu_mul)(gate_up, activation="gelu_tanh")
    assert_near(y, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gate_is_rounded_before_the_product(impl: Implementation, dtype: torch.dtype) -> None:
    """As module by module: nearly every value bit by bit, since exp may differ in fp32's last one."""
    gate_up = normal(16, 128, dtype=dtype, device=impl.device) * 3
    gate, up = gate_up.chunk(2, dim=1)
    expected = (gate.double() * torch.sigmoid(gate.double())).to(dtype) * up
    assert float((impl(silu_mul)(gate_up) == expected).double().mean()) > 0.99


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_far_gates_saturate(impl: Implementation, activation: Gate) -> None:
    gate_up = torch.tensor([[-1000.0, 1000.0, 2.0, 3.0]], device=impl.device)
    y = impl(silu_mul)(gate_up, activation=activation)
    assert y.tolist() == [[0.0, 3000.0]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_other_tiles_and_a_row_stride(impl: Implementation) -> None:
    wide = normal(3, 220, dtype=torch.float32, device=impl.device)
    y = impl(silu_mul)(wide[:, :200], tiles={"BLOCK_I": 32, "num_warps": 1})
    gate, up = wide[:, :200].double().chunk(2, dim=1)
    assert_near(y, gate * torch.sigmoid(gate) * up)


def test_refused() -> None:
    with pytest.raises(IngotError, match="two halves"):
        silu_mul(torch.zeros(2, 5))
    with pytest.raises(IngotError, match="unknown tile choice"):
        launched(silu_mul)(torch.zeros(2, 4), tiles={"BLOCK": 32})
    with pytest.raises(IngotError, match="power of two"):
        launched(silu_mul)(torch.zeros(2, 4), tiles={"BLOCK_I": 48})
