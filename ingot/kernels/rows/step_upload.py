"""A step's numbers, copied from the host's pinned memory by a kernel.

A copy by the copy engine costs a decode step about 15 µs in which no kernel runs; this kernel reads pinned
memory at its own address, through the bus, and the step's first kernel follows it like any other.

    upload_step(host, out, side, 1)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_contiguous, runs_on_gpu

BLOCK, WARPS = 1024, 4


@triton.jit(do_not_specialize=["turn", "words"])
def upload_step_kernel(
    host_ptr: tl.tensor,
    out_ptr: tl.tensor,
    side_ptr: tl.tensor,
    turn: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK words; the first one also writes ``turn``. Nothing of the host is cached."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(out_ptr + at, tl.load(host_ptr + at, mask=inside, other=0, cache_modifier=".cv"), mask=inside)
    if side_ptr is not None:  # noqa: SIM102  a constant, and a value
        if tl.program_id(0) == 0:
            tl.store(side_ptr, turn)


def upload_step(
    host: torch.Tensor, out: torch.Tensor, side: torch.Tensor | None = None, turn: int = 0
) -> None:
    """Copy ``host`` to ``out``, and ``turn`` to ``side``; nothing waits.

    Args:
        host: [N] int32, contiguous, on the CPU; pinned where ``out`` is on a GPU.
        out: [N] int32, contiguous.
        side: [1] int32 on the device of ``out``, or None.
    """
    expect("out", out, (None,), like=out, dtype=torch.int32)
    expect_contiguous("host", host)
    if host.device.type == "cuda" or host.dtype != torch.int32 or host.shape != out.shape:
        seen = (host.device, host.dtype, tuple(host.shape))
        raise KernelArgumentError("host has the wrong form", seen=seen, allowed=("cpu", out.dtype, out.shape))
    if side is not None:
        expect("side", side, (1,), like=out)
    if not runs_on_gpu(out):
        out.copy_(host)
        if side is not None:
            side.fill_(turn)
        return
    words = out.shape[0]
    upload_step_kernel[(max(triton.cdiv(words, BLOCK), 1),)](
        host, out, side, turn, words, BLOCK=BLOCK, num_warps=WARPS
    )
