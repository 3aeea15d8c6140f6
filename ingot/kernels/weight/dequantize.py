"""A weight of few bits as a whole matrix in the dtype of the activations.

Owns the kernel that writes it for the matrix library, whose products of many rows are worth the pass. The
layout and its meaning are stored_weight.py's. Knows no product.

    y = F.linear(x, dequantize(weight, x.dtype))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import KernelArgumentError, expect_float, runs_on_gpu
from ingot.kernels.weight.stored_weight import (
    StoredWeight,
    chunk_columns,
    dequantized,
    expect_weight,
    part_columns,
    symmetric_zero,
)
from ingot.kernels.weight.word_places import word_places

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
    """One chunk of BLOCK_N rows; the columns of a part of its words lie side by side, within one group."""
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


def dequantize_triton(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`dequantize`, unchecked."""
    outputs, width = weight.out_features, weight.in_features
    out = torch.empty((outputs, width), dtype=dtype, device=weight.values.device)
    if not out.numel():
        return out
    assert weight.scales is not None
    chunks = triton.cdiv(width, chunk_columns(weight.bits, weight.group))
    dequantize_kernel[(triton.cdiv(outputs, BLOCK_N), chunks)](
        weight.values,
        weight.scales,
        weight.zeros,
        out,
        weight.values.stride(0),
        weight.scales.stride(0) if weight.group else 0,
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


dequantize_reference = dequantized


def dequantize(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K], equal to ``dequantized`` to the bit.

    Args:
        weight: of 8 or 4 bits, scales in ``dtype``; a dense one comes back as it is.
        dtype: fp16, bf16 or fp32.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    if weight.bits == 16:
        if weight.values.dtype != dtype:
            raise KernelArgumentError(
                "a dense weight keeps its dtype", seen=dtype, allowed=weight.values.dtype
            )
        return weight.values
    like = torch.empty((0, weight.in_features), dtype=dtype, device=weight.values.device)
    expect_float("dtype", like)
    expect_weight(weight, like)
    if runs_on_gpu(weight.values):
        return dequantize_triton(weight, dtype)
    return dequantize_reference(weight, dtype)
