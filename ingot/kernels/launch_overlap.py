"""Programmatic dependent launch (sm_90): a kernel starts while the one before it still runs.

The tile ``OVERLAP`` is 1 (off), 2 (on) or 4 (on, and whatever else the op says). Every program waits: the
next kernel relies on that. Before the wait a kernel may read only what no kernel has written since the last
launch without overlap: in a chain of early starts the kernel before the previous one may still run too. On
older GPUs asking for it is an error.

    wait_for_previous(OVERLAP)                                # in the kernel
    kernel[grid](..., **launch_options(choice, x.device))     # in the launcher
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ingot.kernels.kernel_checks import KernelArgumentError

LINE_BYTES = tl.constexpr(128)


@triton.jit
def prefetch_lines(places: tl.tensor, wanted: tl.tensor) -> None:
    """Prefetch the wanted cache lines at these pointers into L2; nothing waits for them."""
    asm: tl.constexpr = (
        "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; @%p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    )
    tl.inline_asm_elementwise(
        asm, "=r,l,r", [places.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def start_next(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start once every program of this one has reached this point."""
    if OVERLAP > 1:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAP > 1:
        cuda.gdc_wait()


@functools.cache
def overlaps(device: torch.device) -> bool:
    """True where programmatic dependent launch exists."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def other_overlap(device: torch.device | None) -> list[dict[str, int]]:
    """What tuning tries for an op that does not overlap by default."""
    return [{"OVERLAP": 2}] if device is not None and overlaps(device) else []


def launch_options(choice: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Triton's launch options for an op's tiles: warps and overlap.

    Raises:
        KernelArgumentError: OVERLAP on a GPU that has no programmatic dependent launch.
    """
    options = {"num_warps": choice["num_warps"]}
    if choice["OVERLAP"] == 1:
        return options
    if device.type == "cuda" and not overlaps(device):
        raise KernelArgumentError(
            "this GPU cannot start a kernel before the previous one ends",
            seen=torch.cuda.get_device_capability(device),
            allowed="compute capability 9.0 and later",
            fix='tiles {"OVERLAP": 1}',
        )
    return {**options, "launch_pdl": True}
