"""Products of one row with weights of 8 or 4 bits by the kernel of stream_loop.py, for Hopper GPUs.

y = stream_linear(x, weight, bias, residual)
inner = stream_gate_up(x, weight, norm, 1e-5)
q = stream_qkv(x, weight, bias, norm, 1e-5, place)      # a Placement
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.cache.qkv_placement import Placement
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_range,
    multiprocessors,
    runs_on_gpu,
)
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.product.few_rows.small_linear import small_linear_reference
from ingot.kernels.product.few_rows.small_qkv import small_qkv_reference
from ingot.kernels.product.few_rows.stream_loop import LINES, StreamLoop, stream_kernel
from ingot.kernels.product.product_arguments import HeadShape
from ingot.kernels.tiles.product_tiles import MULTIPROCESSORS
from ingot.kernels.weight.stored_weight import (
    BLOCK_ROWS,
    StoredWeight,
    chunk_columns,
    expect_weight,
)

DTYPES = (torch.bfloat16,)
STAGE_CHUNKS = 8  # of a block, in a stage: one per warp
FORMS = {(4, 64, True), (4, 64, False), (4, 128, True), (4, 128, False), (8, 0, True)}  # True: without zeros
PER_MULTIPROCESSOR = 2  # programs
MOST_COLUMNS = 16384  # of x in shared memory
NORMED_COLUMNS = 4096  # of a row that rms_norm.py's kernel takes by 8 warps


@functools.lru_cache(maxsize=4096)
def stream_loop(
    outputs: int,
    columns: int,
    bits: int,
    group: int,
    span: int,
    programs: int = PER_MULTIPROCESSOR * MULTIPROCESSORS,
    overlap: int = 2,
    stages: int = 4,
) -> tuple[StreamLoop, int]:
    """The constants of a product and its number of programs, at most ``programs``.

    ``outputs``: rows of the weight; ``span``: as of ``StreamLoop``.
    """
    blocks = 2 if span else 1
    tiles = outputs // BLOCK_ROWS // blocks
    per = triton.cdiv(tiles, programs)
    steps = triton.cdiv(columns, STAGE_CHUNKS * chunk_columns(bits, group))
    stages = min(stages, per * steps * blocks)
    loop = StreamLoop(bits, group, columns, steps, tiles, per, blocks, stages, span, overlap)
    return loop, min(programs, tiles)


def descriptor(words: torch.Tensor) -> TensorDescriptor:
    """Words [rows, words] int16 as lines of 128 bytes, of which a copy takes a block's share of a stage."""
    lines = words.numel() // 64
    return TensorDescriptor(words.view(torch.int32).view(lines, 32), [lines, 32], [32, 1], [128, 32], LINES)


def takes_stream(weight: StoredWeight, dtype: torch.dtype) -> bool:
    """Whether this kernel multiplies a row in ``dtype`` by this weight."""
    form = (weight.bits, weight.group, weight.zeros is None) in FORMS and weight.order is None
    blocks = weight.out_features % (2 * BLOCK_ROWS) == 0 and weight.in_features % 8 == 0
    return form and blocks and weight.in_features <= MOST_COLUMNS and dtype in DTYPES


def stream_linear(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    **tiles: int,
) -> torch.Tensor:
    """y = x W^T + bias + residual, [1, N].

    Args:
        x: [1, K] bf16, K up to 16384.
        weight: [N, K] in 4 bits by 64 or 128 columns, or in 8 bits per row without zeros.
        bias, residual: [N] and [1, N], added before the sum is rounded.
        norm, eps: with [K] bf16, K 4096, RMSNorm(x) is multiplied, to the bit as by ``rms_norm``.

    Raises:
        KernelArgumentError: another form of weight or rows.
    """
    outputs = _expect(x, weight, norm)
    if residual is not None:
        expect("residual", residual, (1, outputs), like=x)
    if bias is not None:
        expect("bias", bias, (outputs,), like=x)
    if not runs_on_gpu(x):
        return small_linear_reference(x, weight, bias, residual, norm, eps)
    y = x.new_empty(1, outputs)
    _launch(x, weight, y, (residual, bias, norm, eps), 0, None, (), tiles)
    return y


def stream_gate_up(
    x: torch.Tensor, weight: StoredWeight, norm: torch.Tensor | None = None, eps: float = 0.0, **tiles: int
) -> torch.Tensor:
    """cast(silu(g)) * u, [1, I], of a weight [2 I, K]: the gate's rows, then up's. Otherwise as
    ``stream_linear``.
    """
    outputs = _expect(x, weight, norm) // 2
    if not runs_on_gpu(x):
        return silu_mul_reference(small_linear_reference(x, weight, None, None, norm, eps))
    y = x.new_empty(1, outputs)
    _launch(x, weight, y, (None, None, norm, eps), outputs // BLOCK_ROWS, None, (), tiles)
    return y


def stream_qkv(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    place: Placement,
    **tiles: int,
) -> torch.Tensor:
    """As ``small_qkv``, of heads that ``takes_heads``; otherwise as ``stream_linear``."""
    outputs = _expect(x, weight, norm)
    if bias is not None:
        expect("bias", bias, (outputs,), like=x)
    if not runs_on_gpu(x):
        return small_qkv_reference(x, weight, bias, norm, eps, place)
    table, places, cache, (heads, kv_heads, head_dim, _) = place
    assert table is not None
    q = x.new_empty(1, heads, head_dim)
    shape = HeadShape(heads, kv_heads, head_dim, place.half, cache.block_size, False)
    strides = (table.stride(0), *cache.keys.stride()[:3])
    out = (None, table, *places, cache.keys, cache.values, q, *strides)
    _launch(x, weight, None, (None, bias, norm, eps), place.half // BLOCK_ROWS, shape, out, tiles)
    return q


def takes_heads(place: Placement) -> bool:
    """Whether the kernel can place these heads: whole ones are rotated, by blocks, and the cache is bf16."""
    heads, dtype = place.heads, place.cache.keys.dtype
    rotated = place.half % BLOCK_ROWS == 0 and place.half * 2 == heads.head_dim and not heads.logn_length
    return rotated and place.cache.scales is None and dtype in DTYPES


def _expect(x: torch.Tensor, weight: StoredWeight, norm: torch.Tensor | None) -> int:
    """The weight's rows; raise unless the kernel takes these."""
    expect_weight(weight, x)
    expect_range("the number of rows", len(x), 1, 1)
    if not takes_stream(weight, x.dtype):
        seen = f"{weight.bits} bits, group {weight.group}, {x.dtype}"
        raise KernelArgumentError("the streaming product cannot read this weight", seen=seen)
    if norm is not None:
        expect("norm", norm, (x.shape[1],), like=x)
        if x.shape[1] != NORMED_COLUMNS:
            what = "the streaming product cannot normalise this row"
            raise KernelArgumentError(what, seen=x.shape[1], allowed=f"{NORMED_COLUMNS} columns")
    return weight.out_features


def _launch(
    x: torch.Tensor,
    weight: StoredWeight,
    y: torch.Tensor | None,
    added: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float],
    span: int,
    shape: HeadShape | None,
    heads: tuple[Any, ...],
    tiles: dict[str, int],
) -> None:
    defaults = {"overlap": 2 if overlaps(x.device) else 1}
    defaults |= {"programs": PER_MULTIPROCESSOR * multiprocessors(x.device)}
    options = defaults | tiles
    registers = options.pop("registers", 128)
    outputs = weight.out_features
    loop, programs = stream_loop(outputs, weight.in_features, weight.bits, weight.group, span, **options)
    scales = weight.scales
    stride = scales.stride(0) if scales is not None and weight.group else 0
    if x.device.type == "cuda" and x.data_ptr() % 16:
        x = x.clone()  # it is read by 16 bytes
    stream_kernel[(programs,)](
        descriptor(weight.values), x, scales, weight.zeros, stride, y, *added, heads, LOOP=loop, SHAPE=shape,
        num_warps=8, maxnreg=registers, **({"launch_pdl": True} if loop.OVERLAP > 1 else {}),
    )  # fmt: skip
