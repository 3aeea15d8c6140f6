"""Attention's output in 8 bits: each head of each token with a scale of its own, or all with a static one.

Owns the end of every attention kernel that may write so, its twin, and the check of what receives it. The
output is rounded to the dtype of the queries first, as without 8 bits: the numbers are those of
``quantize_rows`` by heads. Knows no attention.

    paged_attention(q, ..., out=values, out_scales=scales)
    rows = int8_heads(values, scales)      # [T, num_heads * head_dim], groups of head_dim
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import KernelArgumentError, expect, expect_result
from ingot.kernels.int8_checks import expect_static
from ingot.kernels.int8_round import numbers_of, scale_of
from ingot.kernels.int8_rows import Int8Rows, quantize_rows


@triton.jit
def store_heads(
    wide: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    like_ptr: tl.tensor,
    heads: tl.tensor,
    wanted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    AXIS: tl.constexpr,
    STATIC: tl.constexpr,
) -> None:
    """Store fp32 outputs of ``heads`` [G], counted through all tokens, where they are ``wanted`` [G].

    Channels lie along AXIS of ``wide``. With ``scale_ptr`` in 8 bits, by scales that are stored, or by the
    STATIC one, which is read; ``like_ptr`` has the dtype that outputs are rounded to before.
    """
    channels = tl.expand_dims(tl.arange(0, wide.shape[AXIS]), 1 - AXIS)
    places = out_ptr + tl.expand_dims(heads, AXIS) * HEAD_DIM + channels
    mask = tl.expand_dims(wanted, AXIS) & (channels < HEAD_DIM)
    if scale_ptr is None:
        tl.store(places, wide.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        wide = wide.to(like_ptr.dtype.element_ty).to(tl.float32)
        if STATIC:
            inverse = tl.div_rn(1.0, tl.load(scale_ptr))
        else:
            scale, inverse = scale_of(tl.max(tl.where(mask, tl.abs(wide), 0.0), axis=AXIS))
            tl.store(scale_ptr + heads, scale, mask=wanted)
            inverse = tl.expand_dims(inverse, AXIS)
        tl.store(places, numbers_of(wide, inverse), mask=mask)


def is_static(scales: torch.Tensor | None) -> bool:
    """Whether ``out_scales`` is read and not written."""
    return scales is not None and scales.dim() == 1


def put_heads(attended: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """The PyTorch twin: attended [T, num_heads, head_dim] into ``out``, and scales unless they are static."""
    static = scales if is_static(scales) else None
    rows = quantize_rows(attended.flatten(0, 1), static=static)
    out.copy_(rows.values.view_as(out))
    if static is None:
        scales.copy_(rows.scales.view_as(scales))


def int8_heads(values: torch.Tensor, scales: torch.Tensor) -> Int8Rows:
    """What attention wrote as the rows of the output product."""
    return Int8Rows(values.flatten(1), scales, 0 if is_static(scales) else values.shape[2])


def expect_out(out: torch.Tensor | None, scales: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise unless ``out`` and ``out_scales`` can receive an attention's output."""
    if scales is None:
        if out is not None:
            expect_result("out", out, like=q)
        return
    if out is None:
        raise KernelArgumentError("out_scales needs an int8 out", seen=None)
    expect("out", out, tuple(q.shape), like=q, dtype=torch.int8)
    if is_static(scales):
        expect_static(scales, q)
    else:
        expect("out_scales", scales, tuple(q.shape[:2]), like=q, dtype=torch.float32)
    for name, tensor in (("out", out), ("out_scales", scales)):
        if not tensor.is_contiguous():
            raise KernelArgumentError(f"{name} is not contiguous", seen=tensor.stride())
