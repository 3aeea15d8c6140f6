"""Argument checks of products in 8 bits.

expect_product(x, weight)
"""

from __future__ import annotations

import torch

from ingot.kernels.kernel_checks import FLOAT_DTYPES, KernelArgumentError, expect, expect_range
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.weight.int4_weight import AnyInt8, Int4Weight, expect_int4

MAX_WIDTH = 133_000  # columns whose products of values sum up within int32


def expect_product(x: Int8Rows, weight: AnyInt8, outputs: int | None = None) -> None:
    """Raise unless a product can read these rows and this weight."""
    expect("x", x.values, (None, None), like=x.values, dtype=torch.int8)
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
        expect("scales", weight.scales, (weight.values.shape[0],), like=x.values, dtype=torch.float32)


def expect_output(dtype: torch.dtype) -> None:
    """Raise unless a product can be rounded to the dtype."""
    if dtype not in FLOAT_DTYPES:
        raise KernelArgumentError("the result has the wrong dtype", seen=dtype, allowed=FLOAT_DTYPES)


def scale_stride(x: Int8Rows) -> int:
    """Elements between the scales of two rows; 0 if all rows share one."""
    return x.scales.stride(0) if x.group or x.scales.numel() > 1 else 0
