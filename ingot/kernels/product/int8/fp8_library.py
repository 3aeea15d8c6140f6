"""The matrix library's product of many rows in e4m3, with scales of rows and of outputs, or in blocks.

It is asked not to keep sums in the tensor cores' few bits: on an H100 that costs 12 to 17 % of the speed, and
the error stays that of the result's rounding (docs/performance/int8.md). In blocks each 128 columns join fp32
sums after they are scaled; for that the library wants rows' scales group after group, and whole eights of
rows (it refused 65, 70 and 257).

    if library_takes(x, weight, torch.bfloat16, bias):
        y = library_linear(x, weight, torch.bfloat16, bias)
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ingot.kernels.rows.int8_rows import BLOCK, E4M3, Int8Rows, Int8Weight
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT, MAX_ROWS

_DTYPES = (torch.bfloat16, torch.float16)
_CAPABILITY = (9, 0)  # others have no such product, or with other limits
_BLOCKS_SINCE = ((2, 8), (12, 9))  # PyTorch and CUDA that multiply in blocks
_SCALES_TOGETHER = 4  # scales of a row of blocks start at multiples of 16 bytes
_ROWS_TOGETHER = 8  # of x in blocks


@functools.cache
def _has_product(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


@functools.cache
def _has_blocks(torch_version: str, cuda_version: str | None) -> bool:
    """Whether this PyTorch multiplies in blocks."""
    found = tuple(
        tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        for version in (torch_version, cuda_version or "0.0")
    )
    return all(own >= least for own, least in zip(found, _BLOCKS_SINCE, strict=True))


def library_multiplies(
    weight: Int8Weight, dtype: torch.dtype = torch.bfloat16, bias: torch.Tensor | None = None
) -> bool:
    """Whether the library multiplies many rows by this weight: of a weight elsewhere, on the current GPU."""
    outputs, columns = weight.values.shape
    device = weight.values.device
    if device.type != "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    kind = dtype in _DTYPES and (bias is None or bias.dtype == dtype)
    if weight.values.dtype != E4M3 or not kind or not _has_product(device):
        return False
    if weight.in_blocks:
        whole = columns % (BLOCK * _SCALES_TOGETHER) == 0 and weight.scales.is_contiguous()
        if not whole or not _has_blocks(torch.__version__, torch.version.cuda):
            return False
    return all(size % DESCRIPTOR_ALIGNMENT == 0 for size in (outputs, columns, weight.values.stride(0)))


def library_takes(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> bool:
    """Whether the library multiplies these, of more rows than the kernels of few rows take."""
    if x.values.dtype != E4M3 or len(x.values) <= MAX_ROWS:
        return False
    laid = x.group == BLOCK if weight.in_blocks else not x.group and x.scales.numel() > 1
    starts = (x.values.data_ptr(), x.values.stride(0), weight.values.data_ptr())
    fits = laid and all(start % DESCRIPTOR_ALIGNMENT == 0 for start in starts)
    return fits and library_multiplies(weight, dtype, bias)


def library_linear(
    x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias [M, N], rounded once; only what the library takes."""
    values, scales, beside = x.values, x.scales[:, None], weight.scales[None]
    if weight.in_blocks:
        missing = -len(values) % _ROWS_TOGETHER
        if missing:  # rows of zeros, whose results are dropped
            values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
        scales, beside = F.pad(x.scales.t(), (0, missing)).contiguous().t(), weight.scales.t()
    y: torch.Tensor = torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales,
        scale_b=beside,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return y[: len(x.values)]
