"""The softcap of logits (Gemma-2): cap · tanh(logit / cap).

Owns the formula, in fp32 and rounded once, in place. Knows no head.

    logits = softcap(logits, 30.0)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_float, merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous


@triton.jit
def softcap_kernel(
    x_ptr: tl.tensor, count: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    """BLOCK values a program."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    capped = cap - 2.0 * cap / (1.0 + tl.exp(2.0 * x / cap))
    tl.store(x_ptr + places, capped.to(x_ptr.dtype.element_ty), mask=inside)


def default_tiles() -> dict[str, int]:
    """Tile choices: 8 values a thread."""
    return {"BLOCK": 1024, "num_warps": 4, "OVERLAP": 1}


def softcap_triton(x: torch.Tensor, cap: float, tiles: Mapping[str, int] | None = None) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`softcap`, unchecked."""
    choice = merge_tiles(default_tiles(), tiles)
    if x.numel():
        softcap_kernel[(triton.cdiv(x.numel(), choice["BLOCK"]),)](
            x,
            x.numel(),
            cap,
            BLOCK=choice["BLOCK"],
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return x


def softcap_reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    """The PyTorch reference; arguments as in :func:`softcap`."""
    wide = x.float()  # x itself in fp32
    wide.div_(cap).tanh_().mul_(cap)
    return x if wide is x else x.copy_(wide)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cast(cap · tanh(x / cap)), written over x.

    Args:
        x: [L, V] fp16, bf16 or fp32, contiguous.
        cap: above 0.

    Raises:
        KernelArgumentError: a shape, dtype or stride that the kernel cannot take, or no cap.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    if not x.is_contiguous():
        raise KernelArgumentError("x is not contiguous", seen=x.stride())
    if not cap > 0:
        raise KernelArgumentError("cap is not positive", seen=cap)
    return softcap_triton(x, cap) if runs_on_gpu(x) else softcap_reference(x, cap)
