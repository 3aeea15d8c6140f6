"""The activation of a gated MLP: silu(gate) * up, or gelu(gate) * up.

y = cast(act(g)) * u, where g and u are the two halves of a row: the activation is computed in fp32 and
rounded to the dtype before the product (Hugging Face's order).

    hidden = silu_mul(gate_up)
    hidden = silu_mul(gate_up, activation="gelu_tanh")
    ordered = silu_mul_operand(gate_up)     # columns in the operand's order
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect_rows, merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, other_overlap, start_next, wait_for_previous
from ingot.kernels.rows.operand_rows import OperandRows, operand_place, operand_rows
from ingot.kernels.rows.row_endings import OperandOrder

Gate = Literal["silu", "gelu_tanh"]


@triton.jit
def activated(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """silu(gate) = gate / (1 + exp(-gate)) in fp32. With GELU its tanh approximation, the same formula with
    another exponent: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    if GELU:
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def silu_mul_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ORDERED: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per tile of a row; with ORDERED columns stand in the operand's order."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = cols < INNER
    gate = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + INNER + cols, mask=inside, other=0.0).to(tl.float32)
    bent = activated(gate, GELU).to(y_ptr.dtype.element_ty).to(tl.float32)
    places = y_ptr + row * INNER + operand_place(cols, ORDERED)
    tl.store(places, (bent * up).to(y_ptr.dtype.element_ty), mask=inside)


def default_tiles() -> dict[str, int]:
    """Tile choices for an H200: 16-byte loads, 8 elements per thread; a row of 11008 takes 11 programs."""
    return {"BLOCK_I": 1024, "num_warps": 4, "OVERLAP": 1}


def candidate_tiles(device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles()
    changes = [{"BLOCK_I": 512, "num_warps": 1}, {"BLOCK_I": 2048, "num_warps": 8}]
    return [default, *({**default, **change} for change in [*changes, *other_overlap(device)])]


def _launch(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None, activation: Gate, ordered: bool
) -> torch.Tensor:
    choice = merge_tiles(default_tiles(), tiles)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (rows, triton.cdiv(inner, choice["BLOCK_I"]))
        silu_mul_kernel[grid](
            gate_up,
            y,
            gate_up.stride(0),
            INNER=inner,
            BLOCK_I=choice["BLOCK_I"],
            ORDERED=ordered,
            GELU=activation == "gelu_tanh",
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, gate_up.device),
        )
    return y


def silu_mul_reference(gate_up: torch.Tensor, activation: Gate = "silu") -> torch.Tensor:
    """The PyTorch reference of :func:`silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def silu_mul(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None, activation: Gate = "silu"
) -> torch.Tensor:
    """y = cast(act(gate)) * up (Shazeer, 2020: SwiGLU, GEGLU).

    Args:
        gate_up: [T, 2 I] fp16, bf16 or fp32: the gate, then the up projection.
        tiles: ``BLOCK_I``, ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        activation: of the gate; ``gelu_tanh`` is GELU's tanh approximation.

    Returns:
        [T, I], dtype of gate_up.
    """
    expect_gate_up(gate_up)
    if runs_on_gpu(gate_up):
        return _launch(gate_up, tiles, activation, ordered=False)
    return silu_mul_reference(gate_up, activation)


def silu_mul_operand(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None, activation: Gate = "silu"
) -> OperandRows:
    """:func:`silu_mul` with the result's columns in the operand's order; I is a multiple of 32."""
    expect_gate_up(gate_up)
    OperandOrder().expect(gate_up.shape[1] // 2, gate_up)
    if runs_on_gpu(gate_up):
        return OperandRows(_launch(gate_up, tiles, activation, ordered=True))
    return operand_rows(silu_mul_reference(gate_up, activation))


def expect_gate_up(gate_up: torch.Tensor) -> None:
    """Raise unless the rows are a gate and an up projection of one width."""
    expect_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise KernelArgumentError(
            "gate_up must hold two halves", seen=gate_up.shape[1], allowed="an even width"
        )
