"""A weight of few bits as a whole matrix in the activations' dtype, for the matrix library.

y = F.linear(x, dequantize(weight, x.dtype))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import KernelArgumentError, expect_float, runs_on_gpu
from ingot.kernels.weight.narrow_values import word_places
from ingot.kernels.weight.stored_weight import (
    StoredWeight,
    chunk_columns,
    dequantized,
    expect_weight,
    part_columns,
    symmetric_zero,
)

BLOCK_N = 64
WARPS = 4


@triton.jit
def dequantize_kernel(
    word_ptr: tensor,
    scale_ptr: tensor,
    zero_ptr: tensor,
    out_ptr: tensor,
    word_stride: tensor,
    scale_stride: tensor,
    N: constexpr,
    K: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    WIDTH: constexpr,
    ZERO: constexpr,
    BLOCK_N: constexpr,
) -> None:
    """One program per chunk of BLOCK_N rows; a part's columns are neighbours in one group."""
    PARTS: constexpr = 16 // BITS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = rows < N
    places = word_places(word_ptr, word_stride, rows, chunk * WIDTH + lane)
    words = tl.load(places, mask=inside[:, None], other=0).to(tl.int32)
    for part in tl.static_range(PARTS):
        columns = (chunk * PARTS + part) * WIDTH + lane
        group = 0
        if GROUP > 0:
            group = tl.minimum((chunk * PARTS + part) * WIDTH // GROUP, (K - 1) // GROUP)
        scales = tl.load(scale_ptr + group * scale_stride + rows, mask=inside, other=0.0).to(tl.float32)
        values = ((words >> (BITS * part)) & ((1 << BITS) - 1)).to(tl.float32)
        if zero_ptr is not None:
            zeros = tl.load(zero_ptr + group * scale_stride + rows, mask=inside, other=0).to(tl.float32)
            values -= zeros[:, None]
        else:
            values -= ZERO
        wide = (values * scales[:, None]).to(out_ptr.dtype.element_ty)
        outputs = rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out_ptr + outputs, wide, mask=inside[:, None] & (columns < K)[None, :])


def dequantize(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K], equal to ``dequantized`` to the bit.

    Args:
        weight: of 8 or 4 bits, scales in ``dtype``; a dense one is returned as it is.
        dtype: fp16, bf16 or fp32.
    """
    values, scales, dense = weight.values, weight.scales, weight.values.dtype
    if weight.bits == 16:
        if dense != dtype:
            raise KernelArgumentError("a dense weight keeps its dtype", seen=dtype, allowed=dense)
        return values
    outputs, width = weight.out_features, weight.in_features
    like = torch.empty((0, width), dtype=dtype, device=values.device)
    expect_float("dtype", like)
    expect_weight(weight, like)
    if not runs_on_gpu(values):
        return dequantized(weight, dtype)
    out = torch.empty((outputs, width), dtype=dtype, device=values.device)
    if out.numel():
        assert scales is not None
        chunks = triton.cdiv(width, chunk_columns(weight.bits, weight.group))
        strides = (values.stride(0), scales.stride(0) if weight.group else 0)
        dequantize_kernel[(triton.cdiv(outputs, BLOCK_N), chunks)](
            *(values, scales, weight.zeros, out, *strides),
            N=outputs,
            K=width,
            BITS=weight.bits,
            GROUP=weight.group,
            WIDTH=part_columns(weight.group),
            ZERO=symmetric_zero(weight.bits),
            BLOCK_N=BLOCK_N,
            num_warps=WARPS,
        )
    return out
