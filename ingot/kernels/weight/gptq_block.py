"""GPTQ's walk over the columns of one block: each is quantized, and its error is passed on to those after it.

All columns of some outputs are in registers; outputs are independent, so a block is one launch. Of column j
of an output, in this order and each step rounded to fp32:

    number = clamp(round(w_j / scale) + zero, low, high)      halves to the even step
    error_j = (w_j - (number - zero) · scale) · inverse_j
    w_k = w_k - factor[j, k] · error_j                        for every k > j

    errors = gptq_block(weight, factor, inverse, scales, zeros, groups, 0, 15, numbers)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_range,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.rows.int8_round import WHOLE

TILES = {"BLOCK_N": 32, "num_warps": 4}
MOST_COLUMNS = 256  # per block: 64 registers per thread at BLOCK_N 32 and 4 warps
NUMBERS = (torch.uint8, torch.int8, torch.float32)


@triton.jit
def gptq_block_kernel(
    weight_ptr: tensor,
    factor_ptr: tensor,
    inverse_ptr: tensor,
    scale_ptr: tensor,
    zero_ptr: tensor,
    group_ptr: tensor,
    number_ptr: tensor,
    error_ptr: tensor,
    columns: tensor,
    weight_stride: tensor,
    factor_stride: tensor,
    scale_stride: tensor,
    zero_stride: tensor,
    number_stride: tensor,
    N: constexpr,
    LOW: constexpr,
    HIGH: constexpr,
    BLOCK_K: constexpr,
    BLOCK_N: constexpr,
) -> None:
    """All columns of BLOCK_N outputs; ``weight`` lies column by column, [columns, N]."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    inside = outputs < N
    known = (places < columns)[:, None] & inside[None, :]
    tile = tl.load(weight_ptr + places[:, None] * weight_stride + outputs[None, :], mask=known, other=0.0)
    for place in range(columns):
        group = tl.load(group_ptr + place)
        scale = tl.load(scale_ptr + group * scale_stride + outputs, mask=inside, other=1.0)
        zero = tl.load(zero_ptr + group * zero_stride + outputs, mask=inside, other=0.0)
        behind = (places > place) & (places < columns)
        passed_on = tl.load(factor_ptr + place * factor_stride + places, mask=behind, other=0.0)
        own = tl.sum(tl.where(places[:, None] == place, tile, 0.0), axis=0)
        # Above 2^22 WHOLE is off by less than half a step, and the value is off the grid before and after.
        number = (tl.div_rn(own, scale) + WHOLE) - WHOLE + zero
        number = tl.minimum(tl.maximum(number, LOW), HIGH)
        error = (own - (number - zero) * scale) * tl.load(inverse_ptr + place)
        tl.store(
            number_ptr + place * number_stride + outputs, number.to(number_ptr.dtype.element_ty), mask=inside
        )
        tl.store(error_ptr + place * N + outputs, error, mask=inside)
        tile -= passed_on[:, None] * error[None, :]


def gptq_block_reference(
    weight: torch.Tensor,
    factor: torch.Tensor,
    inverse: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    low: int,
    high: int,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """The PyTorch reference of :func:`gptq_block`."""
    weight = weight.clone()
    errors, passed_on = torch.empty_like(weight), torch.empty_like(weight)
    for place, group in enumerate(groups.tolist()):
        own, scale, zero = weight[place], scales[group], zeros[group]
        number = (own / scale).round_().add_(zero).clamp_(low, high)
        numbers[place] = number
        error = (own - (number - zero) * scale).mul_(inverse[place])
        errors[place] = error
        # Rounded twice, as in the kernel: ``addr_`` would round once where the processor can.
        torch.mul(factor[place, place + 1 :, None], error, out=passed_on[place + 1 :])
        weight[place + 1 :] -= passed_on[place + 1 :]
    return errors


def gptq_block(
    weight: torch.Tensor,
    factor: torch.Tensor,
    inverse: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    low: int,
    high: int,
    numbers: torch.Tensor,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Quantize a block of columns; kernel and reference agree to the bit.

    Args:
        weight: fp32 [columns, N], corrected for all columns before the block; it stays as it is.
        factor: fp32 [columns, columns], the block's part of the upper factor; read above its diagonal.
        inverse: fp32 [columns], 1 / the diagonal.
        scales, zeros: fp32 [groups of the grid, N], zeros whole numbers.
        groups: int64 [columns], row of scales and zeros per column.
        low, high: the lowest and the highest value, of magnitudes up to 255.
        numbers: uint8, int8 or fp32 [columns, N], receives the quantized values.
        tiles: choices over ``TILES``.

    Returns:
        fp32 [columns, N], the errors, by which columns after the block must be corrected.
    """
    columns, outputs = weight.shape
    expect("weight", weight, (None, None), like=weight, dtype=torch.float32)
    expect_range("columns", columns, 1, MOST_COLUMNS)
    expect("factor", factor, (columns, columns), like=weight)
    expect("inverse", inverse, (columns,), like=weight)
    expect("scales", scales, (None, outputs), like=weight)
    expect("zeros", zeros, tuple(scales.shape), like=weight)
    expect("groups", groups, (columns,), like=weight, dtype=torch.int64)
    if numbers.dtype not in NUMBERS:
        raise KernelArgumentError("numbers has the wrong dtype", seen=numbers.dtype, allowed=NUMBERS)
    expect("numbers", numbers, (columns, outputs), like=weight, dtype=numbers.dtype)
    expect_range("low", low, -255, high)
    expect_range("high", high, low, 255)
    if not runs_on_gpu(weight):
        return gptq_block_reference(weight, factor, inverse, scales, zeros, groups, low, high, numbers)
    choice = merge_tiles(TILES, tiles)
    errors = torch.empty((columns, outputs), dtype=torch.float32, device=weight.device)
    if errors.numel():
        gptq_block_kernel[(triton.cdiv(outputs, choice["BLOCK_N"]),)](
            *(weight, factor, inverse, scales, zeros, groups, numbers, errors, columns),
            *(tensor.stride(0) for tensor in (weight, factor, scales, zeros, numbers)),
            N=outputs,
            LOW=float(low),
            HIGH=float(high),
            BLOCK_K=next_power_of_two(columns),
            BLOCK_N=choice["BLOCK_N"],
            num_warps=choice["num_warps"],
            enable_fp_fusion=False,
        )
    return errors
