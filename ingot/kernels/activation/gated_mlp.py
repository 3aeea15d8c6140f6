"""The product inside a gated MLP: silu(gate) * up, or gelu(gate) * up.

Owns the formula y = cast(act(g)) * u, where g and u are the two halves of a row: the activation in fp32,
rounded to the dtype, then the product (Hugging Face's order). Knows no projection.

    hidden = silu_mul(gate_up)
    hidden = silu_mul(gate_up, activation="gelu_tanh")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_float, merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, other_overlap, start_next, wait_for_previous
from ingot.kernels.rows.operand_rows import operand_place

Gate = Literal["silu", "gelu_tanh"]


@triton.jit
def activated(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """silu(gate) = gate / (1 + exp(-gate)) in fp32. With GELU its approximation by tanh, which is the same of
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
    """One piece of one row a program; with ORDERED columns stand in the operand's order."""
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
    """Tile choices for an H200: 16-byte loads, 8 elements a thread; one row of 11008 makes 11 programs."""
    return {"BLOCK_I": 1024, "num_warps": 4, "OVERLAP": 1}


def candidate_tiles(device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles()
    changes = [{"BLOCK_I": 512, "num_warps": 1}, {"BLOCK_I": 2048, "num_warps": 8}]
    return [default, *({**default, **change} for change in [*changes, *other_overlap(device)])]


def silu_mul_triton(
    gate_up: torch.Tensor,
    tiles: Mapping[str, int] | None = None,
    activation: Gate = "silu",
    ordered: bool = False,
) -> torch.Tensor:
    """Launch the kernel; arguments as in ``silu_mul``, unchecked; or ``ordered`` (silu_mul_operand.py)."""
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
    """The PyTorch reference; arguments as in :func:`silu_mul`."""
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
        tiles: ``BLOCK_I``, ``num_warps``, ``OVERLAP`` (as in launch_overlap.py).
        activation: of the gate; ``gelu_tanh`` is GELU's approximation by tanh.

    Returns:
        [T, I], dtype of gate_up.

    Raises:
        KernelArgumentError: a shape, dtype or stride that the kernel cannot take.
    """
    expect_silu_mul(gate_up)
    if runs_on_gpu(gate_up):
        return silu_mul_triton(gate_up, tiles, activation)
    return silu_mul_reference(gate_up, activation)


def expect_silu_mul(gate_up: torch.Tensor) -> None:
    """Raise unless the kernel can take this."""
    expect_float("gate_up", gate_up)
    expect("gate_up", gate_up, (None, None), like=gate_up)
    if gate_up.shape[1] % 2:
        raise KernelArgumentError(
            "gate_up must hold two halves", seen=gate_up.shape[1], allowed="an even width"
        )
