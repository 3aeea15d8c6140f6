"""How attention's output ends: in q's dtype, perhaps in the operand's order, or quantized in the same kernel.

Quantized outputs have one scale per token and head, one static scale, or static steps and zeros per block of
columns. They are rounded to the dtype of q first and equal ``quantize_rows`` by heads, or
``quantize_in_blocks``. Blocks fill the row; they may be parts of heads, hold several, or cross their borders.

    paged_attention(q, ..., out=values, out_scales=scales)      # or out_scales=steps, of block_rows.py
    rows = int8_heads(values, scales)                           # [T, num_heads * head_dim]
    x = OperandRows(paged_attention(q, ..., out_scales=OperandOrder()).flatten(1))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_contiguous,
    expect_static,
)
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from ingot.kernels.rows.int8_round import numbers_of, scale_of, zeroed_numbers
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows
from ingot.kernels.rows.operand_rows import OPERAND_SPAN, operand_place, operand_rows
from ingot.kernels.rows.row_endings import OperandOrder

# [T, num_heads], written; [1] or steps, read; or the column order of an output in q's dtype.
OutScales = torch.Tensor | BlockSteps | OperandOrder
_ORDERED = tl.constexpr(16)  # BITS of an output in the operand's order


@triton.jit
def store_heads(
    wide: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    like_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    wanted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    AXIS: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Store fp32 outputs in the ``wanted`` ones of ``rows`` [G], which number the heads of all tokens.

    ``heads`` [G], or [1] for all, are the heads within a token. Channels lie along AXIS of ``wide``. With
    ``scale_ptr`` outputs are rounded to the dtype of ``like_ptr``, then quantized: by scales that are stored,
    or by static ones of STATIC columns each; with ``zero_ptr`` these are steps of BITS. Without ``scale_ptr``
    16 BITS put channels in the operand's order.
    """
    channels = tl.arange(0, wide.shape[AXIS])
    store_channels(wide, channels, out_ptr, scale_ptr, zero_ptr, like_ptr, rows, tl.expand_dims(heads, AXIS),
                   wanted, HEAD_DIM, AXIS, STATIC, BITS)  # fmt: skip


@triton.jit
def store_channels(
    wide: tl.tensor,
    channels: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    like_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    wanted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    AXIS: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """As :func:`store_heads`, by channels 0, 1, … along AXIS, and ``heads`` that broadcast to ``wide``."""
    places = out_ptr + tl.expand_dims(rows, AXIS) * HEAD_DIM
    places += tl.expand_dims(operand_place(channels, BITS == _ORDERED), 1 - AXIS)
    channels = tl.expand_dims(channels, 1 - AXIS)
    mask = tl.expand_dims(wanted, AXIS) & (channels < HEAD_DIM)
    if scale_ptr is None:
        tl.store(places, wide.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        wide = wide.to(like_ptr.dtype.element_ty).to(tl.float32)
        if zero_ptr is not None:
            cols = heads * HEAD_DIM
            if STATIC % HEAD_DIM != 0:  # else a head lies in one block
                cols = tl.where(channels < HEAD_DIM, cols + channels, cols)
            step, zero = tl.load(scale_ptr + cols // STATIC), tl.load(zero_ptr + cols // STATIC)
            numbers = zeroed_numbers(wide, step, zero, BITS).to(tl.int8)
        elif STATIC:
            numbers = numbers_of(wide, tl.div_rn(1.0, tl.load(scale_ptr)), tl.int8)
        else:
            most = tl.max(tl.where(mask, tl.abs(wide), 0.0), axis=AXIS)
            scale, inverse = scale_of(most, tl.int8)
            tl.store(scale_ptr + rows, scale, mask=wanted)
            numbers = numbers_of(wide, tl.expand_dims(inverse, AXIS), tl.int8)
        tl.store(places, numbers, mask=mask)


def end_pointers(scales: OutScales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``scale_ptr`` and ``zero_ptr`` of ``store_heads``."""
    if isinstance(scales, OperandOrder):
        return None, None
    return (scales.steps, scales.zeros) if isinstance(scales, BlockSteps) else (scales, None)


def end_constants(scales: OutScales | None, width: int) -> dict[str, int]:
    """STATIC and BITS of ``store_heads`` for rows [width]."""
    if isinstance(scales, BlockSteps):
        return {"STATIC": scales.block, "BITS": scales.bits}
    if isinstance(scales, OperandOrder):
        return {"STATIC": 0, "BITS": _ORDERED.value}
    return {"STATIC": width if _is_static(scales) else 0, "BITS": 8}


def _is_static(scales: OutScales | None) -> bool:
    """Whether ``out_scales`` is read, not written."""
    return isinstance(scales, BlockSteps) or (isinstance(scales, torch.Tensor) and scales.dim() == 1)


def scales_at(scales: OutScales, tokens: slice) -> OutScales:
    """``out_scales`` of some tokens; static ones hold for all."""
    return scales[tokens] if isinstance(scales, torch.Tensor) and not _is_static(scales) else scales


def put_heads(attended: torch.Tensor, out: torch.Tensor, scales: OutScales) -> None:
    """The PyTorch reference: write attended [T, num_heads, head_dim] to ``out``, and dynamic scales."""
    if isinstance(scales, OperandOrder):
        out.copy_(operand_rows(attended.flatten(1)).values.view_as(out))
        return
    if isinstance(scales, BlockSteps):
        out.copy_(quantize_in_blocks(attended.flatten(1), scales).values.view_as(out))
        return
    static = scales if _is_static(scales) else None
    rows = quantize_rows(attended.flatten(0, 1), static=static)
    out.copy_(rows.values.view_as(out))
    if static is None:
        scales.copy_(rows.scales.view_as(scales))


def int8_heads(values: torch.Tensor, scales: OutScales) -> Int8Rows:
    """Attention's quantized output as rows of the output product."""
    assert not isinstance(scales, OperandOrder)
    if isinstance(scales, BlockSteps):
        return scales.rows(values.flatten(1))
    return Int8Rows(values.flatten(1), scales, 0 if _is_static(scales) else values.shape[2])


def expect_out(out: torch.Tensor | None, scales: OutScales | None, q: torch.Tensor) -> None:
    """Raise unless ``out`` and ``out_scales`` can receive an attention's output."""
    if scales is None or isinstance(scales, OperandOrder):
        if out is not None:
            expect("out", out, tuple(q.shape), like=q)
            expect_contiguous("out", out)
        if scales is not None and q.shape[2] % OPERAND_SPAN:
            raise KernelArgumentError(
                "the operand's order needs whole spans of columns",
                seen=f"heads of {q.shape[2]} channels",
                allowed=f"a multiple of {OPERAND_SPAN}",
            )
        return
    if out is None:
        raise KernelArgumentError("out_scales needs an int8 out", seen=None)
    expect("out", out, tuple(q.shape), like=q, dtype=torch.int8)
    if isinstance(scales, BlockSteps):
        width = q.shape[1] * q.shape[2]
        scales.expect(width, q)
        if not scales.fill(width):
            raise KernelArgumentError(
                "attention cannot quantize its output in these blocks: use in_blocks on the output",
                seen=f"blocks of {scales.block} columns{'' if scales.order is None else ', ordered'}",
                allowed=f"blocks that divide {width}, without an order",
            )
    elif _is_static(scales):
        expect_static(scales, q)
    else:
        expect("out_scales", scales, tuple(q.shape[:2]), like=q, dtype=torch.float32)
    for name, tensor in zip(("out", "out_scales", "zeros"), (out, *end_pointers(scales)), strict=True):
        if tensor is not None:
            expect_contiguous(name, tensor)
