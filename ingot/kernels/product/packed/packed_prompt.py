"""The product of a prompt's rows with a weight of 8 or 4 bits on Hopper, unpacked beside tensor cores.

    if takes_prompt(x, weight): y = packed_prompt(x, weight, bias)

The kernel is in prompt_loop.py. Of gate and up it also computes the activation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.kernel_checks import expect, multiprocessors, runs_on_gpu
from ingot.kernels.product.packed.packed_matmul import DTYPES, expect_packed, packed_matmul_reference
from ingot.kernels.product.packed.prompt_gates import GATE_ROWS
from ingot.kernels.product.packed.prompt_loop import packed_prompt_kernel
from ingot.kernels.product.packed.prompt_tiles import PromptLoop
from ingot.kernels.product.prompt_epilogue import describable, descriptor, is_hopper
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS, SPLIT_OUTPUTS
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT, MAX_ROWS
from ingot.kernels.weight.stored_weight import StoredWeight, part_columns

BLOCK_N = 128
# Rows of a tile: steps in shared memory, and the time of a tile in % of that of the first.
BLOCK_T = {256: (4, 100), 128: (8, 60)}
WORDS = 2  # chunks of words in shared memory
SPAN = 8  # tiles of rows in turn: programs that run at once read so few rows and weights that L2 has both
# From so many rows on, by bits, a product with more outputs than packed_matmul splits is faster here: x is
# read from L2 once per 128 outputs of 256 rows. The same of as many as one of its smaller tiles has, if they
# are in natural order: packed_matmul's best tiles take them in the operand's.
WIDE_ROWS = {4: 65, 8: 192}
NATURAL_ROWS = range(MAX_ROWS + 1, 129)
_BUILT: set[tuple[Any, ...]] = set()


@functools.lru_cache(maxsize=4096)
def prompt_rows(tokens: int, outputs: int, programs: int) -> int:
    """Rows of a tile: fewer where that ends earlier, because larger tiles leave programs without work."""

    def time(rows: int) -> int:
        return -(-(-(-tokens // rows) * (outputs // BLOCK_N)) // programs) * BLOCK_T[rows][1]

    return min(BLOCK_T, key=time)


def takes_prompt(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Whether this kernel can multiply these rows and this weight: on Hopper, in fp16 or bf16, of whole tiles
    of outputs, and of rows that start at multiples of 16 bytes.
    """
    read = x.dtype in DTYPES and describable(x)
    return read and unpacks_prompts(weight) and weight.scales is not None and weight.scales.dtype == x.dtype


def takes_many_rows(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Whether a product of these rows is this kernel's: of more than packed_matmul takes."""
    return len(x) > PACKED_ROWS and takes_prompt(x, weight)


def takes_wide(rows: int, dtype: torch.dtype, weight: StoredWeight, *, natural: bool = False) -> bool:
    """Whether a product of so many rows, of those that packed_matmul takes, is faster by this kernel; rows
    are contiguous, and ``natural`` if they cannot come in the operand's order.
    """
    some = WIDE_ROWS.get(weight.bits, PACKED_ROWS + 1) <= rows <= PACKED_ROWS
    some = some or (natural and rows in NATURAL_ROWS)
    if not some or weight.out_features <= SPLIT_OUTPUTS or dtype not in DTYPES or not unpacks_prompts(weight):
        return False
    aligned = weight.in_features * dtype.itemsize % DESCRIPTOR_ALIGNMENT == 0
    return aligned and weight.scales is not None and weight.scales.dtype == dtype


def unpacks_prompts(weight: StoredWeight) -> bool:
    """Whether the kernel takes such a weight, on the GPU where it lies."""
    whole = weight.out_features % BLOCK_N == 0
    return whole and weight.bits < 16 and is_hopper(weight.values.device) and describable(weight.values)


def packed_prompt(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias, W of 8 or 4 bits: arguments and rounding are as of :func:`packed_matmul`.

    Args:
        x: [M, K] fp16 or bf16, any M, columns in natural order.
        weight: [N, K], without an order.
        bias: [N], dtype of x, or None.

    Returns:
        [M, N], dtype of x.
    """
    expect_packed(x, weight)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=x)
    if not runs_on_gpu(x):
        y = packed_matmul_reference(x, weight)
        return (y if bias is None else y + bias.float()).to(x.dtype)
    y = x.new_empty((x.shape[0], weight.out_features))
    if y.numel():
        _launch(x, weight, bias, y)
    return y


def add_packed_prompt(
    x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    """hidden + x W^T + bias, rounded once, in place of ``hidden`` [M, N], dtype of x; other arguments are as
    of :func:`packed_prompt`.
    """
    expect_packed(x, weight)
    expect("hidden", hidden, (len(x), weight.out_features), like=x)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=x)
    if not runs_on_gpu(x):
        y = packed_matmul_reference(x, weight)
        return hidden.copy_(hidden.float() + (y if bias is None else y + bias.float()))
    if hidden.numel():
        _launch(x, weight, bias, hidden, adds=True)
    return hidden


def packed_prompt_gate_up(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """silu(gate) * up of the product with gate and up (Shazeer, 2020: SwiGLU), in one kernel, rounded as
    ``silu_mul(packed_prompt(x, weight))``.

    Args:
        x: [M, K] as of :func:`packed_prompt`.
        weight: [2 I, K], gate first; I is a multiple of 64.

    Returns:
        [M, I], dtype of x.
    """
    expect_packed(x, weight)
    if not runs_on_gpu(x):
        return silu_mul_reference(packed_matmul_reference(x, weight).to(x.dtype))
    y = x.new_empty((x.shape[0], weight.out_features // 2))
    if y.numel():
        _launch(x, weight, None, y, gates=True)
    return y


def _launch(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    gates: bool = False,
    adds: bool = False,
) -> None:
    programs = multiprocessors(x.device)
    kind = (weight.bits, weight.group, weight.zeros is not None, bias is not None, gates, adds)
    chunks = weight.values.shape[1] // part_columns(weight.group)
    loops = {rows: prompt_loop_of(kind, rows, chunks) for rows in BLOCK_T}
    block = prompt_rows(len(x), weight.out_features, programs)
    built = (x.dtype, x.device, loops[block]._replace(BLOCK_T=0, STAGES=0))
    if built not in _BUILT:  # a server should not compile beside its first short prompt
        _BUILT.add(built)
        for other in BLOCK_T.keys() - {block}:
            arguments = _arguments(x, weight, bias, y, other)
            packed_prompt_kernel.warmup(*arguments, LOOP=loops[other], num_warps=4, grid=(1,))
    tiles = triton.cdiv(len(x), block) * (weight.out_features // BLOCK_N)
    arguments = _arguments(x, weight, bias, y, block)
    packed_prompt_kernel[(min(tiles, programs),)](*arguments, LOOP=loops[block], num_warps=4)


@functools.cache
def prompt_loop_of(kind: tuple[int, int, bool, bool, bool, bool], rows: int, chunks: int) -> PromptLoop:
    """The kernel's constants: ``kind`` is its first six, ``rows`` a tile's, ``chunks`` a weight row's. An
    iteration of large tiles has as many steps as shared memory.
    """
    unroll = 2 if kind[:3] == (8, 0, False) and rows == 256 and chunks % 2 == 0 else 1
    columns = part_columns(kind[1])
    stages = BLOCK_T[rows][0] * 64 // columns
    return PromptLoop(*kind, columns, rows, BLOCK_N, stages, WORDS, unroll, SPAN)


def _arguments(
    x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, y: torch.Tensor, block: int
) -> tuple[Any, ...]:
    """The kernel's arguments for tiles of ``block`` rows."""
    words, scales = weight.values, weight.scales
    assert scales is not None
    columns = part_columns(weight.group)
    gates = y.shape[1] < weight.out_features
    return (
        descriptor(x, block, columns),
        word_descriptor(words.view(torch.int32), 2 if gates else 4, columns),
        descriptor(y, GATE_ROWS, BLOCK_N // 4) if gates else descriptor(y, block, BLOCK_N // 2),
        scales,
        weight.zeros,
        scales.stride(0) if weight.group else 0,
        bias,
        len(x),
        weight.out_features,
        weight.in_features,
        words.shape[1] // columns,
        0,
    )


def word_descriptor(words: torch.Tensor, blocks: int, columns: int) -> TensorDescriptor:
    """Of a chunk's words [N, W] int32 of so many ``blocks`` of 16 outputs, by pieces of 32 words."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    pieces = words.view(len(words) // 16, -1, 32)
    return TensorDescriptor(
        pieces, list(pieces.shape), list(pieces.stride()), [blocks, columns // 4, 32], layout
    )
