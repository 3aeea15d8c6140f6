"""Arguments of product kernels in groups (pointers, strides and sizes, constants of a loop), and checks.

A launcher passes a plain tuple, which Triton binds fastest, and may leave out the last fields; a kernel names
them, ``x = InputRows(*x)``. (No field is called ``values``, which Triton's own tuples have.) Constants are
one argument, made once.

    few_linear_kernel[grid]((x, x.stride(0), len(x)), stored_argument(weight), (y,), N, share, 1, loop)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_range
from ingot.kernels.rows.int8_rows import BLOCK, E4M3, Int8Rows, Int8Weight
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, expect_int4
from ingot.kernels.weight.stored_weight import StoredWeight

MAX_WIDTH = 133_000  # columns whose products of values sum up within int32


class InputRows(NamedTuple):
    """Few rows of x.

    Attributes:
        ptr, stride, tokens: [tokens, K] and its row stride.
        scales, scale_stride: of int8 rows (int8_rows.py); without a stride all rows share those of groups.
        norm, eps: weight and eps of an RMSNorm that the product applies.
    """

    ptr: Any
    stride: Any
    tokens: Any
    scales: Any = None
    scale_stride: Any = None
    norm: Any = None
    eps: Any = None


class Weight(NamedTuple):
    """A weight as stored_weight.py or int4_weight.py store it.

    Attributes:
        ptr, stride: values, words or pairs.
        scales, zeros: those of a ``StoredWeight``; ``scale_stride`` lies between groups, of both. Of 8 bits
            ``scale_stride`` lies between blocks of rows; without one rows have the scales.
        steps: those of an ``Int4Weight``; ``scale_stride`` is theirs.
    """

    ptr: Any
    stride: Any
    scales: Any = None
    scale_stride: Any = None
    zeros: Any = None
    steps: Any = None


class Sums(NamedTuple):
    """Where whole sums or parts go, and what is added."""

    y: Any
    bias: Any = None
    residual: Any = None
    residual_stride: Any = None


class Heads(NamedTuple):
    """Where queries, keys and values go, and how they are rotated: see ``small_qkv``."""

    bias: Any
    table: Any
    table_rows: Any
    positions: Any
    slots: Any
    keys: Any
    value_cache: Any
    q: Any
    table_stride: Any
    block_stride: Any
    head_stride: Any
    token_stride: Any
    inverse_log: Any = None


class HeadShape(NamedTuple):
    """Constants of ``Heads``; HALF: rotated pairs."""

    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    HALF: int
    BLOCK_SIZE: int
    LOGN: bool


class ProductLoop(NamedTuple):
    """The constants of a product's inner loop.

    Attributes:
        KIND: ``vectors`` (one row), ``matrix``, ``packed``, or straight into registers ``fragments`` and
            ``int8_fragments``.
        K, STEPS: columns, and steps over all of them.
        BITS, GROUP: of the weight; of int8 rows GROUP is theirs.
        WEIGHT_GROUP: of an ``Int4Weight``.
        ASM: whether there is inline assembly; not in the interpreter.
        BLOCK_T, BLOCK_N, BLOCK_K, PREFETCH, FRAGMENTS, OVERLAP, WARPS: tiles, see ``small_linear``.
        BLOCK_X: columns whose squares are summed at once, if a row does not fit BLOCK_K.
    """

    KIND: str
    K: int
    STEPS: int
    BITS: int
    GROUP: int
    WEIGHT_GROUP: int
    ASM: bool
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_K: int
    PREFETCH: int
    FRAGMENTS: int
    OVERLAP: int
    WARPS: int
    BLOCK_X: int = 0


class PackedLoop(NamedTuple):
    """The constants of a product of many rows with packed weights.

    Attributes:
        N, K: outputs and columns.
        BITS, GROUP, PART: of the weight; PART: words per row and chunk.
        DTYPE: Triton's dtype of the rows.
        ASM: whether there is inline assembly; not in the interpreter.
        TMA: whether a descriptor reads the rows.
        BLOCK_T, BLOCK_N, BLOCK_K, WIDE, PREFETCH, AHEAD, DIRECT, OVERLAP: tiles, see ``packed_matmul``.
    """

    N: int
    K: int
    BITS: int
    GROUP: int
    PART: int
    DTYPE: Any
    ASM: bool
    TMA: bool
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_K: int
    WIDE: int
    PREFETCH: int
    AHEAD: int
    DIRECT: int
    OVERLAP: int


def stored_argument(weight: StoredWeight) -> tuple[Any, ...]:
    """The fields of ``Weight`` of a stored weight."""
    if weight.scales is None:
        return weight.values, weight.values.stride(0)
    stride = weight.scales.stride(0) if weight.group else None
    if weight.zeros is None:
        return weight.values, weight.values.stride(0), weight.scales, stride
    return weight.values, weight.values.stride(0), weight.scales, stride, weight.zeros


def sums_argument(
    y: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """The fields of ``Sums``."""
    if residual is None:
        return (y,) if bias is None else (y, bias)
    return y, bias, residual, residual.stride(0)


def expect_product(x: Int8Rows, weight: AnyInt8, outputs: int | None = None) -> None:
    """Raise unless a product can read these rows and this weight."""
    kind = E4M3 if x.values.dtype == E4M3 and not isinstance(weight, Int4Weight) else torch.int8
    expect("x", x.values, (None, None), like=x.values, dtype=kind)
    rows, columns = x.values.shape
    expect_range("the width", columns, 1, MAX_WIDTH)
    if x.group:
        if columns % x.group:
            raise KernelArgumentError("groups must divide the width", seen=x.group, allowed=columns)
        expect_range("the group", x.group, 1, 256)
        expect("scales of x", x.scales, (rows, columns // x.group), like=x.values, dtype=torch.float32)
    else:
        size = 1 if x.scales.numel() == 1 else rows
        expect("scales of x", x.scales, (size,), like=x.values, dtype=torch.float32)
    if isinstance(weight, Int4Weight):
        expect_int4(weight)
        seen = torch.empty((len(weight.pairs), weight.in_features), dtype=torch.int8, device="meta")
        expect("weight", seen, (outputs, columns), like=seen)
        expect("scales", weight.scales, (len(weight.pairs),), like=x.values, dtype=torch.float32)
    else:
        expect("weight", weight.values, (outputs, columns), like=x.values)
        _expect_scales(weight, x)


def _expect_scales(weight: Int8Weight, x: Int8Rows) -> None:
    rows, columns = weight.values.shape
    shape: tuple[int, ...] = (rows,)
    if weight.in_blocks:
        if x.group != BLOCK or weight.values.dtype != E4M3:
            seen = f"groups of {x.group}, {weight.values.dtype}"
            allowed = f"groups of {BLOCK}, {E4M3}"
            raise KernelArgumentError(
                "a weight in blocks cannot multiply these rows", seen=seen, allowed=allowed
            )
        shape = (-(-rows // BLOCK), columns // BLOCK)
    expect("scales", weight.scales, shape, like=x.values, dtype=torch.float32)


def scale_stride(x: Int8Rows) -> int:
    """Elements between the scales of two rows; 0 if all rows share one."""
    return x.scales.stride(0) if x.group or x.scales.numel() > 1 else 0
