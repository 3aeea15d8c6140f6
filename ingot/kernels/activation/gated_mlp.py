"""The product inside a gated MLP: silu(gate) * up.

Owns the formula y = cast(g / (1 + exp(-g))) * u, where g and u are the two halves of a row: silu in fp32,
rounded to the dtype, then the product (Hugging Face's order). Knows no projection.

    hidden = silu_mul(gate_up)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import KernelArgumentError, expect, expect_float, merge_tiles, runs_on_gpu
from ingot.kernels.overlap import launch_options, other_overlap, start_next, wait_for_previous
from ingot.kernels.rows.operand_rows import operand_place


@triton.jit
def silu_mul_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ORDERED: tl.constexpr,
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
    activated = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    places = y_ptr + row * INNER + operand_place(cols, ORDERED)
    tl.store(places, (activated * up).to(y_ptr.dtype.element_ty), mask=inside)


def default_tiles() -> dict[str, int]:
    """Tile choices for an H200: 16-byte loads, 8 elements a thread; one row of 11008 makes 11 programs."""
    return {"BLOCK_I": 1024, "num_warps": 4, "OVERLAP": 1}


def candidate_tiles(device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles()
    changes = [{"BLOCK_I": 512, "num_warps": 1}, {"BLOCK_I": 2048, "num_warps": 8}]
    return [default, *({**default, **change} for change in [*changes, *other_overlap(device)])]


def silu_mul_triton(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None, ordered: bool = False
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`silu_mul`, unchecked; or ``ordered`` (operand.py)."""
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
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, gate_up.device),
        )
    return y


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None) -> torch.Tensor:
    """y = cast(silu(gate)) * up (Shazeer, 2020: SwiGLU).

    Args:
        gate_up: [T, 2 I] fp16, bf16 or fp32: the gate, then the up projection.
        tiles: ``BLOCK_I``, ``num_warps``, ``OVERLAP`` (as in overlap.py).

    Returns:
        [T, I], dtype of gate_up.

    Raises:
        KernelArgumentError: a shape, dtype or stride that the kernel cannot take.
    """
    expect_silu_mul(gate_up)
    if runs_on_gpu(gate_up):
        return silu_mul_triton(gate_up, tiles)
    return silu_mul_reference(gate_up)


def expect_silu_mul(gate_up: torch.Tensor) -> None:
    """Raise unless the kernel can take this."""
    expect_float("gate_up", gate_up)
    expect("gate_up", gate_up, (None, None), like=gate_up)
    if gate_up.shape[1] % 2:
        raise KernelArgumentError(
            "gate_up must hold two halves", seen=gate_up.shape[1], allowed="an even width"
        )
