"""Products of up to 64 rows and a weight, both in 8 bits: sums, scaled once. int8_linear.py calls them.

parts = small_int8_parts_triton(x8, weight)      # sum_norm adds them up
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.product.few_rows.few_rows_kernels import few_linear_kernel
from ingot.kernels.product.few_rows.resolved_launch import LINEAR, PARTS, ResolvedLaunch, int8_launch
from ingot.kernels.product.product_arguments import scale_stride, sums_argument
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Sums
from ingot.kernels.weight.expand_int8 import whole_int8
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, outputs_of


def int8_rows_argument(x: Int8Rows, scaled: bool = True) -> tuple[Any, ...]:
    """The fields of ``InputRows``; not ``scaled``: without scales, so that sums stay exact."""
    if not scaled:
        return x.values, x.values.stride(0), x.values.shape[0]
    shared = x.group and (x.scales.stride(0) == 0 or len(x.scales) == 1)
    stride = None if shared else scale_stride(x)
    return x.values, x.values.stride(0), x.values.shape[0], x.scales, stride


def int8_weight_argument(weight: AnyInt8, launch: ResolvedLaunch) -> tuple[Any, ...]:
    """The fields of ``Weight``, in 4 bits or as int8, which another kernel may have to write."""
    if isinstance(weight, Int4Weight) and launch.loop.KIND == "int8_fragments":
        levels = (weight.steps.stride(0), weight.zeros, weight.steps)
        return weight.pairs, weight.pairs.stride(0), weight.scales, *levels
    whole = whole_int8(weight)
    if whole.in_blocks:
        return whole.values, whole.values.stride(0), whole.scales, whole.scales.stride(0)
    return whole.values, whole.values.stride(0), whole.scales


def _launch(
    x: Int8Rows,
    weight: AnyInt8,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    launch: ResolvedLaunch,
) -> None:
    """Write y [SPLITS * M, N]: int32 sums or, in a float dtype, scaled ones."""
    few_linear_kernel[launch.grid](
        int8_rows_argument(x, scaled=y.dtype != torch.int32),
        int8_weight_argument(weight, launch),
        sums_argument(y, bias, residual),
        N=outputs_of(weight),
        SHARE=launch.share,
        SPLITS=launch.splits,
        LOOP=launch.loop,
        ACTIVATION=None,
        **launch.options,
    )


def small_int8_linear_triton(
    x: Int8Rows,
    weight: AnyInt8,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in ``int8_linear``, unchecked."""
    shape = (x.values.shape[0], outputs_of(weight))
    y = torch.empty(shape, dtype=dtype, device=x.values.device) if out is None else out
    if y.numel():
        _launch(x, weight, bias, residual, y, int8_launch(LINEAR, x, weight, tiles))
    return y


def small_int8_parts_triton(
    x: Int8Rows, weight: AnyInt8, tiles: Mapping[str, int] | None = None
) -> Int8Sums | torch.Tensor:
    """Launch the kernel; arguments as in :func:`int8_linear_parts`, unchecked."""
    launch = int8_launch(PARTS, x, weight, tiles)
    shape = (launch.splits, x.values.shape[0], outputs_of(weight))
    scaled = bool(x.group) or x.values.dtype == E4M3
    dtype = torch.float32 if scaled else torch.int32
    y = torch.empty(shape, dtype=dtype, device=x.values.device)
    if y.numel():
        _launch(x, weight, None, None, y, launch)
    return y if scaled else Int8Sums(y, x.scales, weight.scales)
