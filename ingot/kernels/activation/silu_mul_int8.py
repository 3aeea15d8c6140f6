"""An MLP's activation in 8 bits, and the same quantization of any rows.

One kernel holds a whole row in registers: act(gate) * up as in gated_mlp.py, a plain MLP's act(row), or the
row itself, rounded to the dtype, then quantized by the rule of int8_rows.py.

    inner = silu_mul_int8(gate_up)
    inner = quantized(up, activation="gelu")
    x8 = quantized(x)                  # where no kernel that makes x does it
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.activation.gated_mlp import Gate, activated, expect_gate_up, silu_mul_reference
from ingot.kernels.activation.plain_activation import Plain, bent, plain_activation
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect_range,
    expect_rows,
    expect_static,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.launch_overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.rows.int8_round import numbers_of, row_inverse, row_scales, scale_of, store_int8_row
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows

MANY_ROWS = 1024  # more than a GPU's multiprocessors run at once
MAX_WIDTH = 65536  # a program holds a row in registers: 64 values per thread


@triton.jit
def silu_mul_int8_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    REST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per row; without an ACTIVATION of the row itself. GROUP columns share a scale, with 0 the
    whole row, which has at most BLOCK_I + REST columns.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * INNER
    cols = tl.arange(0, BLOCK_I)
    y = _ended(x_row, cols, INNER, GATED, ACTIVATION)
    if GROUP:
        _store_groups(y, y_row, scale_ptr + row * (INNER // GROUP), INNER, GROUP)
    elif REST:
        more = BLOCK_I + tl.arange(0, REST)
        rest = _ended(x_row, more, INNER, GATED, ACTIVATION)
        most = tl.maximum(tl.max(tl.abs(y), axis=0), tl.max(tl.abs(rest), axis=0))
        kind: tl.constexpr = y_ptr.dtype.element_ty
        inverse = row_inverse(most, scale_ptr, row, STATIC, kind)
        tl.store(y_row + cols, numbers_of(y, inverse, kind))
        tl.store(y_row + more, numbers_of(rest, inverse, kind), mask=more < INNER)
    else:
        store_int8_row(y, y_row, scale_ptr, row, cols < INNER, STATIC, x_ptr.dtype.element_ty)


@triton.jit
def _ended(
    x_row: tl.tensor, cols: tl.tensor, INNER: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Columns ``cols`` of a row after its activation, rounded to its dtype, in fp32; zeros from INNER on."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    inside = cols < INNER
    y = tl.load(x_row + cols, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_row + INNER + cols, mask=inside, other=0.0).to(tl.float32)
        gate = activated(y, ACTIVATION == "gelu_tanh").to(dtype).to(tl.float32)
        y = (gate * up).to(dtype).to(tl.float32)
    elif ACTIVATION is not None:
        y = bent(y, ACTIVATION).to(dtype).to(tl.float32)
    return y


@triton.jit
def _store_groups(
    wide: tl.tensor, y_ptr: tl.tensor, scale_ptr: tl.tensor, COUNT: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Store a row [BLOCK] of COUNT values, then zeros, in whole groups, and their scales."""
    GROUPS: tl.constexpr = wide.shape[0] // GROUP
    pieces = tl.reshape(wide, [GROUPS, GROUP])
    groups, cols = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    scale, inverse = scale_of(tl.max(tl.abs(pieces), axis=1), kind)
    inside = groups < COUNT // GROUP
    tl.store(scale_ptr + groups, scale, mask=inside)
    places = y_ptr + groups[:, None] * GROUP + cols[None, :]
    tl.store(places, numbers_of(pieces, inverse[:, None], kind), mask=inside[:, None])


def default_tiles(inner: int, device: torch.device, rows: int = 1) -> dict[str, int]:
    """Tile choices for an H200: 16 elements per thread for the latency of few rows, else 64."""
    each, least = (512, 1) if rows <= MANY_ROWS else (2048, 2)
    warps = min(max(next_power_of_two(inner) // each, least), 32)
    return {"num_warps": warps, "OVERLAP": 2 if overlaps(device) else 1}


def _launch(
    x: torch.Tensor,
    inner: int,
    static: torch.Tensor | None,
    tiles: Mapping[str, int] | None,
    gated: bool,
    activation: Gate | Plain | None = None,
    group: int = 0,
    dtype: torch.dtype = torch.int8,
) -> Int8Rows:
    rows = x.shape[0]
    choice = merge_tiles(default_tiles(inner, x.device, rows), tiles)
    values = torch.empty((rows, inner), dtype=dtype, device=x.device)
    groups = inner // group if group else 1
    whole = next_power_of_two(inner)
    half = whole // 2 if whole > inner and not group else 0  # fewer columns beyond the row are computed
    scales = row_scales(rows * groups, static, x.device)
    if values.numel():
        silu_mul_int8_kernel[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            INNER=inner,
            BLOCK_I=half or whole,
            REST=next_power_of_two(inner - half) if half else 0,
            GATED=gated,
            ACTIVATION=activation,
            GROUP=group,
            STATIC=static is not None,
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return Int8Rows(values, scales.view(rows, groups) if group else scales, group)


def silu_mul_int8(
    gate_up: torch.Tensor,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    activation: Gate = "silu",
    dtype: torch.dtype = torch.int8,
    group: int = 0,
) -> Int8Rows:
    """``quantize_rows(silu_mul(gate_up))`` to the bit, in one kernel.

    Args:
        gate_up: [T, 2 I] fp16, bf16 or fp32: the gate, then the up projection; I up to 65536.
        static: fp32 [1], one scale for all rows; None: one scale per row.
        tiles: ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        activation: as of :func:`silu_mul`.
        dtype: int8 or e4m3, of the values.
        group: as of :func:`quantize_rows`, a power of two; not with ``static``.

    Returns:
        [T, I] in 8 bits.
    """
    expect_gate_up(gate_up)
    inner = gate_up.shape[1] // 2
    expect_range("the width", inner, 1, MAX_WIDTH)
    expect_static(static, gate_up)
    _expect_groups(group, inner, static)
    if runs_on_gpu(gate_up):
        return _launch(gate_up, inner, static, tiles, True, activation, group, dtype)
    return quantize_rows(silu_mul_reference(gate_up, activation), group, static, dtype)


def _expect_groups(group: int, width: int, static: torch.Tensor | None) -> None:
    if group and (width % group or static is not None):
        what = "groups must divide the width and have scales of their own"
        raise KernelArgumentError(what, seen=group, allowed=f"a divisor of {width}")


def quantized(
    x: torch.Tensor,
    group: int = 0,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    activation: Plain | None = None,
    dtype: torch.dtype = torch.int8,
) -> Int8Rows:
    """``quantize_rows(x, group, static, dtype)`` as a kernel, of x or its activation.

    Args:
        x: [T, K] fp16, bf16 or fp32, K up to 65536.
        group, static: as of :func:`quantize_rows`; not both.
        tiles, dtype: as of :func:`silu_mul_int8`.
        activation: of a plain MLP, in fp32, rounded to the dtype of x.
    """
    expect_rows("x", x)
    expect_range("the width", x.shape[1], 1, MAX_WIDTH)
    _expect_groups(group, x.shape[1], static)
    expect_static(static, x)
    if not runs_on_gpu(x):
        y = x if activation is None else plain_activation(x, activation)
        return quantize_rows(y, group, static, dtype)
    if not group or group == next_power_of_two(group):
        return _launch(x, x.shape[1], static, tiles, False, activation, group, dtype)
    pieces = _launch(x.reshape(-1, group), group, None, tiles, False, activation, dtype=dtype)
    return Int8Rows(pieces.values.view(x.shape), pieces.scales.view(x.shape[0], -1), group)
