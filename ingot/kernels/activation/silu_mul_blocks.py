"""A gated MLP's activation quantized by blocks of columns (RPTQ), and the same quantization of any rows.

act(gate) * up is rounded to the dtype as in gated_mlp.py, then quantized by the rule of block_rows.py. Scales
are known before, so a program takes a tile of a row.

    inner = silu_mul_in_blocks(gate_up, steps)
    x8 = in_blocks(x, steps)           # where no kernel that makes x does it
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.activation.gated_mlp import Gate, activated, expect_gate_up, silu_mul_reference
from ingot.kernels.kernel_checks import expect_rows, merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from ingot.kernels.rows.int8_round import block_numbers, steps_at
from ingot.kernels.rows.int8_rows import Int8Rows


@triton.jit
def silu_mul_blocks_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    step_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per BLOCK_I columns of a row; without GATED of the row itself."""
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = cols < INNER
    places = cols
    if order_ptr is not None:
        places = tl.load(order_ptr + cols, mask=inside, other=0)
    step, zero = steps_at(cols, step_ptr, zero_ptr, WIDTH, GROUP)
    wait_for_previous(OVERLAP)
    y = tl.load(x_ptr + row * x_stride + places, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + INNER + places, mask=inside, other=0.0).to(tl.float32)
        bent = activated(y, GELU).to(dtype).to(tl.float32)
        y = (bent * up).to(dtype).to(tl.float32)
    numbers = block_numbers(y, cols, step, zero, INNER, BITS)
    tl.store(y_ptr + row * WIDTH + cols, numbers, mask=cols < WIDTH)


def default_tiles(device: torch.device) -> dict[str, int]:
    """Tile choices: 8 elements per thread."""
    return {"BLOCK_I": 1024, "num_warps": 4, "OVERLAP": 2 if overlaps(device) else 1}


def _launch(
    x: torch.Tensor,
    inner: int,
    steps: BlockSteps,
    tiles: Mapping[str, int] | None,
    gated: bool,
    activation: Gate = "silu",
) -> Int8Rows:
    choice = merge_tiles(default_tiles(x.device), tiles)
    values = torch.empty((x.shape[0], steps.width), dtype=torch.int8, device=x.device)
    if values.numel():
        silu_mul_blocks_kernel[(x.shape[0], triton.cdiv(steps.width, choice["BLOCK_I"]))](
            x,
            steps.order,
            steps.steps,
            steps.zeros,
            values,
            x.stride(0),
            INNER=inner,
            WIDTH=steps.width,
            BLOCK_I=choice["BLOCK_I"],
            GROUP=steps.block,
            BITS=steps.bits,
            GATED=gated,
            GELU=activation == "gelu_tanh",
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return steps.rows(values)


def silu_mul_in_blocks(
    gate_up: torch.Tensor,
    steps: BlockSteps,
    tiles: Mapping[str, int] | None = None,
    activation: Gate = "silu",
) -> Int8Rows:
    """``quantize_in_blocks(silu_mul(gate_up), steps)`` to the bit, in one kernel.

    Args:
        gate_up: [T, 2 I] fp16, bf16 or fp32: the gate, then the up projection.
        steps: of rows [I].
        tiles: ``BLOCK_I``, ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        activation: as of :func:`silu_mul`.

    Returns:
        int8 [T, whole blocks].
    """
    expect_gate_up(gate_up)
    inner = gate_up.shape[1] // 2
    steps.expect(inner, gate_up)
    if runs_on_gpu(gate_up):
        return _launch(gate_up, inner, steps, tiles, gated=True, activation=activation)
    return quantize_in_blocks(silu_mul_reference(gate_up, activation), steps)


def in_blocks(x: torch.Tensor, steps: BlockSteps, tiles: Mapping[str, int] | None = None) -> Int8Rows:
    """``quantize_in_blocks(x, steps)`` as a kernel, of x [T, K] fp16, bf16 or fp32."""
    expect_rows("x", x)
    steps.expect(x.shape[1], x)
    if runs_on_gpu(x):
        return _launch(x, x.shape[1], steps, tiles, gated=False)
    return quantize_in_blocks(x, steps)
