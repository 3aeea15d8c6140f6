"""The softcap of logits (Gemma-2), cap · tanh(logit / cap), in fp32 and rounded once, in place.

logits = softcap(logits, 30.0)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect_contiguous, expect_rows, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous

TILES = {"BLOCK": 1024, "num_warps": 4, "OVERLAP": 1}  # 8 values per thread


@triton.jit
def softcap_kernel(
    x_ptr: tl.tensor, count: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    """One program per BLOCK values."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    capped = cap - 2.0 * cap / (1.0 + tl.exp(2.0 * x / cap))
    tl.store(x_ptr + places, capped.to(x_ptr.dtype.element_ty), mask=inside)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cast(cap · tanh(x / cap)), in place; x [L, V] fp16, bf16 or fp32, contiguous."""
    expect_rows("x", x)
    expect_contiguous("x", x)
    if not cap > 0:
        raise KernelArgumentError("cap is not positive", seen=cap)
    if not runs_on_gpu(x):
        wide = x.float().div_(cap).tanh_().mul_(cap)  # x itself, if x is fp32
        return x if wide is x else x.copy_(wide)
    count, block, overlap = x.numel(), TILES["BLOCK"], TILES["OVERLAP"]
    if count:
        options = launch_options(TILES, x.device)
        softcap_kernel[(triton.cdiv(count, block),)](x, count, cap, BLOCK=block, OVERLAP=overlap, **options)
    return x
