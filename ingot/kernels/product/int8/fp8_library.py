"""The matrix library's product of many rows in e4m3, with scales of rows and of outputs.

It is asked not to keep sums in the tensor cores' few bits: on an H100 that costs 12 to 17 % of the speed, and
the error stays that of the result's rounding (docs/performance/int8.md).

    if library_takes(x, weight, torch.bfloat16, bias):
        y = library_linear(x, weight, torch.bfloat16, bias)
"""

from __future__ import annotations

import functools

import torch

from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT, MAX_ROWS

_DTYPES = (torch.bfloat16, torch.float16)
_CAPABILITY = (9, 0)  # others have no such product, or with other limits


@functools.cache
def _has_product(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


def library_takes(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> bool:
    """Whether the library multiplies these, of more rows than the kernels of few rows take."""
    if x.values.dtype != E4M3 or len(x.values) <= MAX_ROWS or x.group or x.scales.numel() == 1:
        return False
    whole = (*weight.values.shape, x.values.stride(0), weight.values.stride(0))
    starts = (x.values.data_ptr(), weight.values.data_ptr())
    fits = all(size % DESCRIPTOR_ALIGNMENT == 0 for size in (*whole, *starts))
    kind = dtype in _DTYPES and (bias is None or bias.dtype == dtype)
    return fits and kind and _has_product(x.values.device)


def library_linear(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias [M, N], rounded once; only what the library takes."""
    y: torch.Tensor = torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales[:, None],
        scale_b=weight.scales[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return y
