"""Rows of a table that stays in the host's pinned memory, read by the GPU itself.

The ids of a step's tokens are on the GPU only, so the host cannot gather their rows before the step. A kernel
reads pinned memory at its own address, through the bus, also when a CUDA graph replays it.

    hidden = host_rows(table, ids)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_contiguous,
    expect_rows,
    runs_on_gpu,
)

BLOCK_K = 1024
WARPS = 4


@triton.jit(do_not_specialize_on_alignment=("ids_ptr",))  # a part of a step's buffer: it varies
def host_rows_kernel(
    table_ptr: tensor, ids_ptr: tensor, out_ptr: tensor, K: constexpr, BLOCK_K: constexpr
) -> None:
    """One program per row and BLOCK_K of its columns: many small reads hide the latency of the bus."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = columns < K
    source = tl.load(ids_ptr + row)
    values = tl.load(table_ptr + source * K + columns, mask=inside)
    tl.store(out_ptr + row * K + columns, values, mask=inside)


def host_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows ``ids`` of a table, on the device of the ids.

    Args:
        table: [N, K] fp16, bf16 or fp32, contiguous, on the CPU; pinned where the ids are on a GPU.
        ids: [T] int64, from 0 to N - 1.

    Returns:
        [T, K], dtype of the table.
    """
    expect_rows("table", table)
    if table.device.type == "cuda":
        raise KernelArgumentError("table is on another device", seen=table.device, allowed="cpu")
    expect_contiguous("table", table)
    expect("ids", ids, (None,), like=ids, dtype=torch.int64)
    if not runs_on_gpu(ids):
        return table[ids]
    if ids.is_cuda and not table.is_pinned():
        what = "a GPU cannot read this table"
        raise KernelArgumentError(what, seen="pageable memory", allowed="pinned memory")
    width = table.shape[1]
    out = torch.empty((ids.shape[0], width), dtype=table.dtype, device=ids.device)
    if out.numel():
        host_rows_kernel[(ids.shape[0], triton.cdiv(width, BLOCK_K))](
            table, ids, out, K=width, BLOCK_K=BLOCK_K, num_warps=WARPS
        )
    return out
