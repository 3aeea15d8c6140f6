"""The product of many rows with a weight of 8 or 4 bits, unpacked in registers: no wide copy is written.

The left operand is a tile of the weight, for up to 256 rows at once. Scales of groups multiply the values
before the product, rounded once, as in ``dequantized``: y is the matrix library's product with the widened
weight, but for the order of sums. Scales of whole rows multiply the sums in fp32. packed_direct.py has the
kernel of few rows, packed_tiles.py the tiles and the limit of rows.

    y = packed_matmul(x, weight, bias)
    parts = packed_matmul_parts(x, weight)          # for sum_norm
    if takes_operand(len(x), weight, x.device): y = packed_matmul(operand_rows(x), weight, bias)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

# mypy: disable-error-code="assignment"
# (Tuples grow in jitted loops.)
import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ingot.kernels.kernel_checks import KernelArgumentError, expect, merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.product.packed.packed_direct import packed_direct_kernel
from ingot.kernels.product.packed.packed_loads import (
    ask_beside,
    ask_words,
    of_groups,
    read_tokens,
    side_by_side,
    store_packed,
)
from ingot.kernels.product.product_arguments import PackedLoop, Weight, stored_argument
from ingot.kernels.rows.operand_rows import OPERAND_SPAN, OperandRows
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS, SPLIT_OUTPUTS, packed_tiles
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT, WeightShape
from ingot.kernels.weight.narrow_values import ended, scaled, unpack, unpack_from, word_places
from ingot.kernels.weight.stored_weight import (
    BLOCK_ROWS,
    StoredWeight,
    chunk_columns,
    dequantized,
    expect_weight,
    part_columns,
)

DTYPES = (torch.float16, torch.bfloat16)
FloatRows = torch.Tensor | OperandRows


def takes_packed(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of so many rows is this kernel's, not the matrix library's; module by module the
    small kernels compute up to ``MAX_ROWS``.
    """
    return rows <= PACKED_ROWS and dtype in DTYPES


@triton.jit(do_not_specialize=["tokens", "splits"])
def packed_matmul_kernel(
    x_source: tensor,
    weight: tensor,
    bias_ptr: tensor,
    y_ptr: tensor,
    tokens: tensor,
    splits: tensor,
    x_stride: tensor,
    LOOP: constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_T rows, or with ``splits`` a part of their sums, in steps of BLOCK_K columns:
    a chunk of words or, in 4 bits, its lower and upper halves in turn.
    """
    weight = Weight(*weight)
    K: constexpr = LOOP.K
    N: constexpr = LOOP.N
    BITS: constexpr = LOOP.BITS
    GROUP: constexpr = LOOP.GROUP
    PART: constexpr = LOOP.PART
    DTYPE: constexpr = LOOP.DTYPE
    ASM: constexpr = LOOP.ASM
    AHEAD: constexpr = LOOP.AHEAD if ASM else 0
    BLOCK_T: constexpr = LOOP.BLOCK_T
    BLOCK_N: constexpr = LOOP.BLOCK_N
    BLOCK_K: constexpr = LOOP.BLOCK_K
    STEPS: constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS: constexpr = BLOCK_K // PART
    TURNS: constexpr = 16 // BITS // PARTS
    GROUPS: constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    if LOOP.OVERLAP == 2:
        start_next(LOOP.OVERLAP)
    first_token, start, split = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    rows = start + tl.arange(0, BLOCK_N)
    own = rows if N % BLOCK_N == 0 else tl.minimum(rows, N - 1)
    places = word_places(weight.ptr, weight.stride, own, tl.arange(0, PART))
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    middle = tl.full([BLOCK_N], 1 << (BITS - 1), dtype=tl.uint8)
    if weight.zeros is not None and GROUP == 0:
        middle = tl.load(weight.zeros + own)
    begin, end = split * STEPS // splits, (split + 1) * STEPS // splits
    if AHEAD > 0:  # a weight is constant: it may be loaded before the previous kernel has ended
        for soon in tl.static_range(AHEAD):
            ask_words(weight, start, (begin + soon) // TURNS, begin + soon < end, PART, LOOP)
    wait_for_previous(LOOP.OVERLAP)
    for step in tl.range(begin, end):
        first = step * BLOCK_K
        if GROUP > 0:
            if weight.zeros is not None:
                zeros = of_groups(weight.zeros, weight.scale_stride, own, first, LOOP)
            scales = of_groups(weight.scales, weight.scale_stride, own, first, LOOP)
            if ASM and LOOP.PREFETCH > 0:  # loaded only where they are needed, so at least from L2
                ahead = first + LOOP.PREFETCH * BLOCK_K
                ask_beside(weight.scales, weight.scale_stride, start, ahead, LOOP)
                if weight.zeros is not None:
                    ask_beside(weight.zeros, weight.scale_stride, start, ahead, LOOP)
        if AHEAD > 0:
            ask_words(weight, start, (step + AHEAD) // TURNS, step + AHEAD < end, PART, LOOP)
        if TURNS > 1:
            # Bits to skip: 0 or 8. One value for all rows would be broadcast in the layout in which words are
            # copied, and unpacked words would go through shared memory again; a loaded one is not. Scales are
            # never NaN.
            upper = tl.load(weight.scales + own, mask=(own >= 0) & (step % 2 == 1), other=float("nan"))
            upper = upper.to(tl.float32)
            bit = tl.where(upper == upper, 8, 0)[:, None]
        words = tl.load(places + step // TURNS * (16 * PART))
        if LOOP.WIDE:
            x = read_tokens(x_source, x_stride, first_token, tokens, first, BLOCK_K, LOOP)
        tiles = ()
        for part in tl.static_range(PARTS):
            zero = middle
            if GROUP > 0 and weight.zeros is not None:
                zero = zeros[part * GROUPS // PARTS]
            if TURNS > 1:
                w = unpack_from(words, bit, zero, part, DTYPE, ASM)
            else:
                w = unpack(words, zero, part, BITS, DTYPE, ASM)
            if GROUP > 0:
                w = scaled(w, scales[part * GROUPS // PARTS], ASM)
            if LOOP.WIDE:
                tiles = tiles + (w,)  # noqa: RUF005
            else:
                x = read_tokens(x_source, x_stride, first_token, tokens, first + part * PART, PART, LOOP)
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if LOOP.WIDE:
            w = side_by_side(tiles, PARTS)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        acc = ended(acc, ASM)
    if LOOP.OVERLAP == 4:
        start_next(LOOP.OVERLAP)
    store_packed(acc, rows, own, first_token, split, tokens, weight, bias_ptr, y_ptr, LOOP)


def _described(x: torch.Tensor, tma: int) -> bool:
    """Whether a descriptor reads x: rows start at multiples of 16 bytes. The tile ``TMA`` 2 demands it."""
    starts = (x.data_ptr(), x.stride(0) * x.element_size())
    fits = all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)
    if tma == 2 and not fits:
        raise KernelArgumentError(
            "these rows cannot be read through a tensor descriptor",
            seen=f"stride {x.stride(0)}",
            allowed=f"rows that start at multiples of {DESCRIPTOR_ALIGNMENT} bytes",
            fix='tiles {"TMA": 1}',
        )
    return tma != 1 and fits


def takes_operand(rows: int, weight: StoredWeight, device: torch.device, split: bool = False) -> bool:
    """Whether a product of so many rows, in parts with ``split``, can have the columns of x in the operand's
    order and is faster so.
    """
    whole = weight.in_features % OPERAND_SPAN == 0 and weight.out_features % BLOCK_ROWS == 0
    if weight.bits == 16 or not whole:
        return False
    return packed_tiles(rows, weight, device, split, ordered=True)["DIRECT"] > 0


def _launch(
    rows_of: FloatRows, weight: StoredWeight, bias: torch.Tensor | None, y: torch.Tensor, launch: PackedLaunch
) -> None:
    x, loop, options = _values(rows_of), launch.loop, launch.options
    tma = isinstance(rows_of, OperandRows) or _described(x, launch.tma)
    block = [loop.BLOCK_T, loop.BLOCK_K if loop.WIDE else loop.PART]
    source: Any = TensorDescriptor(x, list(x.shape), list(x.stride()), block) if tma else x
    grid = (triton.cdiv(x.shape[0], loop.BLOCK_T), triton.cdiv(loop.N, loop.BLOCK_N), launch.splits)
    common = (stored_argument(weight), bias, y, x.shape[0], launch.splits)
    if loop.DIRECT:
        packed_direct_kernel[grid](source, *common, LOOP=loop, **options)
    else:
        packed_matmul_kernel[grid](
            source, *common, x.stride(0), LOOP=loop if tma else launch.by_pointers, **options
        )


def _values(x: FloatRows) -> torch.Tensor:
    """The rows as they lie in memory."""
    return x.values if isinstance(x, OperandRows) else x


class PackedLaunch(NamedTuple):
    """A launch: constants with and without a descriptor, parts of the sums, the tile TMA, Triton's
    options.
    """

    loop: PackedLoop
    by_pointers: PackedLoop
    splits: int
    tma: int
    options: dict[str, Any]


def _launch_of(
    x: FloatRows, weight: StoredWeight, tiles: Mapping[str, int] | None, split: bool
) -> PackedLaunch:
    """The launch of a product, cached by rows, shape, dtype and device."""
    values, given = _values(x), tuple(tiles.items()) if tiles else ()
    kind = (values.dtype, values.device, split, isinstance(x, OperandRows))
    shape = (weight.out_features, weight.in_features, weight.bits, weight.group)
    return _resolved(values.shape[0], shape, *kind, given)


@functools.lru_cache(maxsize=4096)
def _resolved(
    rows: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    split: bool,
    ordered: bool,
    given: tuple[tuple[str, int], ...],
) -> PackedLaunch:
    """Fit BLOCK_K to the layout: a chunk; in 4 bits also half a chunk of 256 columns; straight into registers
    also two chunks, if there are no groups.
    """
    weight = WeightShape(*sizes)
    choice = merge_tiles(packed_tiles(rows, weight, device, split, ordered), dict(given))
    if ordered != (choice["DIRECT"] > 0) or (ordered and weight.out_features % BLOCK_ROWS):
        raise KernelArgumentError(
            "tile DIRECT must be on exactly when x has its columns in the operand's order",
            seen=f"x {'in' if ordered else 'not in'} that order, tile DIRECT {choice['DIRECT']}, "
            f"{weight.out_features} outputs",
            allowed=f"both or neither; outputs in whole blocks of {BLOCK_ROWS}",
            fix="operand_rows(x) where takes_operand(...), else x.natural()",
        )
    chunk, width = chunk_columns(weight.bits, weight.group), weight.in_features
    half = weight.bits == 4 and chunk == 256 and choice["BLOCK_K"] < chunk and not choice["DIRECT"]
    straight = ordered and choice["WIDE"] and not weight.group
    double = straight and choice["BLOCK_K"] > chunk and triton.cdiv(width, chunk) % 2 == 0
    choice["BLOCK_K"] = chunk // 2 if half else 2 * chunk if double else chunk
    loop = PackedLoop(
        *(weight.out_features, width, weight.bits, weight.group, part_columns(weight.group)),
        DTYPE=tl.float16 if dtype == torch.float16 else tl.bfloat16,
        ASM=device.type != "cpu",
        TMA=True,
        **{name: choice[name] for name in PackedLoop._fields[8:]},
    )
    options = launch_options(choice, device) | {"num_stages": choice["num_stages"]}
    options["maxnreg"] = choice["REGISTERS"] if choice["REGISTERS"] < 256 else None
    # A part without columns would be read before it is written.
    splits = min(choice["SPLITS"], triton.cdiv(width, choice["BLOCK_K"]))
    return PackedLaunch(loop, loop._replace(TMA=False), splits, choice["TMA"], options)


def _parts(x: FloatRows, weight: StoredWeight, launch: PackedLaunch) -> torch.Tensor:
    shape = (launch.splits, _values(x).shape[0], weight.out_features)
    y = _values(x).new_empty(shape, dtype=torch.float32)
    if y.numel():
        _launch(x, weight, None, y, launch)
    return y


def packed_matmul_reference(x: FloatRows, weight: StoredWeight) -> torch.Tensor:
    """The PyTorch reference of both products without a bias: [M, N] fp32."""
    x = x.natural() if isinstance(x, OperandRows) else x
    wide = dequantized(weight, x.dtype if weight.group else torch.float32).float()
    return torch.nn.functional.linear(x.float(), wide)


def packed_matmul(
    x: FloatRows,
    weight: StoredWeight,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = x W^T + bias, W of 8 or 4 bits.

    Sums are fp32 and rounded once. Values of groups are scaled in the dtype of x, rounded once; with one
    scale per row they are exact.

    Args:
        x: [M, K] fp16 or bf16, any M; in the operand's order if ``takes_operand``.
        weight: [N, K] in 8 or 4 bits without an order; a constant: with ``OVERLAP`` not written since the
            last launch without.
        bias: [N], dtype of x, or None.
        tiles: ``BLOCK_T`` rows and ``BLOCK_N`` outputs per program, ``BLOCK_K`` (less than a chunk: in 4 bits
            its halves in turn; more: two at once, with ``DIRECT`` and ``WIDE`` and without groups), ``TMA``
            (how x is read: 1 pointers, 2 a descriptor, 4 a descriptor if possible), ``OVERLAP`` (1, 2 or 4,
            as in :func:`small_linear`), ``SPLITS`` (parts of the sums, which PyTorch adds up for a whole
            product), ``REGISTERS`` (limit per thread; 256: none), ``PREFETCH`` (steps ahead that scales and
            zeros of groups are prefetched into L2; 0: not), ``AHEAD`` (the same of words, after those loaded
            into registers; those of the first steps before the wait), ``WIDE`` (1: all columns of a step in
            one product; 0: one product per part of the words), ``DIRECT`` (of x in the operand's order: words
            go straight into registers, so many steps ahead; 0: through shared memory), ``num_warps``,
            ``num_stages``.

    Returns:
        [M, N], dtype of x.
    """
    expect_packed(x, weight)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=_values(x))
    if not runs_on_gpu(_values(x)):
        y = packed_matmul_reference(x, weight)
        return (y if bias is None else y + bias.float()).to(_values(x).dtype)
    launch = _launch_of(x, weight, tiles, split=weight.out_features <= SPLIT_OUTPUTS)
    if launch.splits > 1:
        whole, dtype = _parts(x, weight, launch).sum(0), _values(x).dtype
        if bias is None:
            return whole.to(dtype)
        return torch.add(whole, bias, out=torch.empty_like(whole, dtype=dtype))
    y = _values(x).new_empty((_values(x).shape[0], weight.out_features))
    if y.numel():
        _launch(x, weight, bias, y, launch)
    return y


def packed_matmul_parts(
    x: FloatRows, weight: StoredWeight, tiles: Mapping[str, int] | None = None
) -> torch.Tensor:
    """x W^T as partial sums over the columns, which :func:`sum_norm` adds up: [SPLITS, M, N] fp32, on the CPU
    one part. Arguments are as of :func:`packed_matmul`.
    """
    expect_packed(x, weight)
    if runs_on_gpu(_values(x)):
        return _parts(x, weight, _launch_of(x, weight, tiles, split=True))
    return packed_matmul_reference(x, weight)[None]


def expect_packed(rows_of: FloatRows, weight: StoredWeight) -> None:
    """Raise unless a product of these rows can read the weight."""
    x = _values(rows_of)
    if x.dtype not in DTYPES:
        raise KernelArgumentError("x has the wrong dtype", seen=x.dtype, allowed=DTYPES)
    expect("x", x, (None, None), like=x)
    if weight.bits == 16:
        raise KernelArgumentError("the weight is dense", seen=weight.values.dtype, allowed="8 or 4 bits")
    expect_weight(weight, x)
