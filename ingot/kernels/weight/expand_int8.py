"""A weight of 4 bits inside values of 8 as a whole matrix of int8, for int8 products.

Four values lie in a 32-bit word, and all arithmetic is on such words: a value times its step is at most 15 ·
16 = 240 and stays in its byte, and the zero's share is subtracted byte by byte without a carry. That is two
operations per value, instead of four or more.

    y = int8_linear(x8, expand_int8(weight), torch.float16)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import merge_tiles, runs_on_gpu
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, expanded, expect_int4, num_groups

TILES = {"BLOCK_N": 32, "TOGETHER": 4, "num_warps": 4}


@triton.jit
def stepped(values: tensor, steps: tensor, shifts: tensor) -> tensor:
    """Four values per word times their step, less ``shifts``, byte by byte modulo 256."""
    HIGH: constexpr = -0x7F7F7F80  # 0x80808080: the highest bit of every byte
    LOW: constexpr = 0x7F7F7F7F
    a = values * steps
    # A byte's highest bit is set before the subtraction, so that none borrows from its neighbour, and
    # corrected after it.
    return ((a | HIGH) - (shifts & LOW)) ^ ((a ^ ~shifts) & HIGH)


@triton.jit
def expand_int8_kernel(
    pair_ptr: tensor,
    step_ptr: tensor,
    zero_ptr: tensor,
    out_ptr: tensor,
    step_stride: tensor,
    N: constexpr,
    GROUPS: constexpr,
    WORDS: constexpr,
    BLOCK_N: constexpr,
    TOGETHER: constexpr,
) -> None:
    """One program per TOGETHER groups of BLOCK_N rows; WORDS: of a group in pairs."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    groups = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    lanes = tl.arange(0, WORDS)[None, None, :]
    inside = (rows < N)[:, None] & (groups < GROUPS)[None, :]  # [BLOCK_N, TOGETHER]
    beside = groups[None, :].to(tl.int64) * step_stride + rows[:, None]
    steps = tl.load(step_ptr + beside, mask=inside, other=0).to(tl.int32)
    zeros = tl.load(zero_ptr + beside, mask=inside, other=0).to(tl.int32)
    shifts = (zeros * steps * 0x01010101)[:, :, None]
    steps, inside = steps[:, :, None], inside[:, :, None]
    groups_before = rows.to(tl.int64)[:, None] * GROUPS + groups[None, :]
    places = groups_before[:, :, None] * WORDS + lanes
    words = tl.load(pair_ptr + places, mask=inside, other=0)
    low = stepped(words & 0x0F0F0F0F, steps, shifts)
    high = stepped((words >> 4) & 0x0F0F0F0F, steps, shifts)
    outputs = groups_before[:, :, None] * (2 * WORDS) + lanes
    tl.store(out_ptr + outputs, low, mask=inside)
    tl.store(out_ptr + outputs + WORDS, high, mask=inside)


def whole_int8(weight: AnyInt8) -> Int8Weight:
    """A weight as whole rows of int8; of 4 bits a temporary that the kernel writes."""
    return expand_int8(weight) if isinstance(weight, Int4Weight) else weight


def expand_int8(weight: Int4Weight, tiles: Mapping[str, int] | None = None) -> Int8Weight:
    """The weight as int8 products read it, equal to ``expanded`` to the bit: int8 [N, K], a view of rows of
    whole groups in a new tensor, and the weight's own scales.

    ``tiles``: ``BLOCK_N`` rows and ``TOGETHER`` groups per program, ``num_warps``.
    """
    expect_int4(weight)
    if not runs_on_gpu(weight.pairs):
        return expanded(weight)
    outputs, groups = weight.pairs.shape[0], num_groups(weight.in_features, weight.group)
    choice = merge_tiles(TILES, tiles)
    out = torch.empty((outputs, groups * weight.group), dtype=torch.int8, device=weight.pairs.device)
    if out.numel():
        grid = (triton.cdiv(outputs, choice["BLOCK_N"]), triton.cdiv(groups, choice["TOGETHER"]))
        pairs, whole = weight.pairs.view(torch.int32), out.view(torch.int32)
        expand_int8_kernel[grid](
            *(pairs, weight.steps, weight.zeros, whole, weight.steps.stride(0)),
            N=outputs,
            GROUPS=groups,
            WORDS=weight.group // 8,
            BLOCK_N=choice["BLOCK_N"],
            TOGETHER=choice["TOGETHER"],
            num_warps=choice["num_warps"],
        )
    return Int8Weight(out[:, : weight.in_features], weight.scales, temporary=True)
