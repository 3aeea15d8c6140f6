"""The product of a prompt's rows with a weight of 8 or 4 bits on Hopper, unpacked beside tensor cores.

    if takes_prompt(x, weight): y = packed_prompt(x, weight, bias)

The kernel is in prompt_loop.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.kernel_checks import expect, multiprocessors, runs_on_gpu
from ingot.kernels.product.packed.packed_matmul import DTYPES, expect_packed, packed_matmul_reference
from ingot.kernels.product.packed.prompt_loop import packed_prompt_kernel
from ingot.kernels.product.packed.prompt_tiles import COLS, PromptLoop
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT
from ingot.kernels.weight.stored_weight import StoredWeight

BLOCK_N = 128
# Rows of a tile: steps in shared memory, and the time of a tile in % of that of the first.
BLOCK_T = {256: (5, 100), 128: (10, 60)}
SPAN = 16
_BUILT: set[tuple[Any, ...]] = set()
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.lru_cache(maxsize=4096)
def prompt_rows(tokens: int, outputs: int, programs: int) -> int:
    """Rows of a tile: fewer where that ends earlier, because larger tiles leave programs without work."""

    def time(rows: int) -> int:
        return -(-(-(-tokens // rows) * (outputs // BLOCK_N)) // programs) * BLOCK_T[rows][1]

    return min(BLOCK_T, key=time)


@functools.cache
def _hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions: compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def takes_prompt(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Whether this kernel can multiply these rows and this weight: on Hopper, in fp16 or bf16, of whole tiles
    of outputs, without groups or by 128 columns and more, and of rows that start at multiples of 16 bytes.
    """
    starts = (x.data_ptr(), x.stride(0) * x.element_size())
    read = x.dtype in DTYPES and all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)
    return read and unpacks_prompts(weight) and weight.scales is not None and weight.scales.dtype == x.dtype


def unpacks_prompts(weight: StoredWeight) -> bool:
    """Whether the kernel takes such a weight, on the GPU where it lies."""
    whole = weight.out_features % BLOCK_N == 0
    return whole and weight.bits < 16 and weight.group not in (32, 64) and _hopper(weight.values.device)


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


def _launch(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    programs = multiprocessors(x.device)
    kind = (weight.bits, weight.group, weight.zeros is not None, bias is not None)
    loops = {rows: prompt_loop_of(kind, rows, weight.values.shape[1] // COLS.value) for rows in BLOCK_T}
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
def prompt_loop_of(kind: tuple[int, int, bool, bool], rows: int, chunks: int) -> PromptLoop:
    """The kernel's constants: ``kind`` is its first four, ``rows`` a tile's, ``chunks`` a weight row's. In 8
    bits a chunk is two steps, in which words do not arrive: they are loaded earlier.
    """
    early = rows == 256 and kind[:3] == (8, 0, False) and chunks > 1
    unroll = 2 if early and chunks % 2 == 0 else 1
    return PromptLoop(*kind, rows, BLOCK_N, BLOCK_T[rows][0], early, unroll, SPAN)


def _arguments(
    x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, y: torch.Tensor, block: int
) -> tuple[Any, ...]:
    """The kernel's arguments for tiles of ``block`` rows."""
    words, scales = weight.values, weight.scales
    assert scales is not None
    return (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [block, COLS.value], _LAYOUT),
        TensorDescriptor(y, list(y.shape), list(y.stride()), [block, BLOCK_N // 2], _LAYOUT),
        words.view(torch.int32),
        words.stride(0) * 8,  # 16 rows, two words each
        scales,
        weight.zeros,
        scales.stride(0) if weight.group else 0,
        bias,
        len(x),
        weight.out_features,
        weight.in_features,
        words.shape[1] // COLS.value,
        0,
    )
