"""A linear layer whose result for a row has the same bits beside any other rows, however many.

y = x W^T + b with one order of the sum over K: steps of 16 columns, ascending, each added by the tensor cores
to one fp32 accumulator; then the bias, then one rounding. Tile sizes follow the number of rows and change no
bit: all choices in ``TILE_LIST`` are tested to be equal on the GPU.

    y = invariant_linear(x, weight, bias)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import expect, expect_rows, merge_tiles, runs_on_gpu
from ingot.kernels.tiles.product_tiles import has_descriptors

NAMES = ("BLOCK_N", "BLOCK_T", "BLOCK_K", "num_warps", "num_stages")

# The only tiles in 16 bits: outputs, rows, columns, warps, stages. Measured on an H200 at the shapes of a 7B
# model, from few rows to many.
TILE_LIST: tuple[tuple[int, int, int, int, int], ...] = (
    (16, 8, 256, 2, 6),
    (32, 8, 256, 2, 4),
    (64, 8, 128, 4, 3),
    (32, 16, 128, 4, 6),
    (64, 16, 128, 4, 3),
    (64, 32, 128, 4, 5),
    (64, 32, 64, 4, 6),
    (64, 64, 128, 8, 4),
    (128, 64, 64, 8, 5),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
)
# Most rows, and the index in the list for fewer than 8192 outputs, fewer than 16384, and more.
_BY_ROWS = ((8, (0, 1, 2)), (16, (3, 4, 4)), (32, (5, 6, 6)), (64, (7, 8, 9)), (256, (10, 11, 11)))
_MANY, _WIDEST, _DEEPEST = 11, 12, 13
_FULL = 128  # programs that keep an H200 busy; with fewer of the widest tiles, smaller ones are taken
FLOAT_TILES = (32, 32, 32, 4, 2)  # fp32 has no exact tensor-core path


@triton.jit
def _place(tile: tensor, tokens: tensor, N: constexpr, BLOCK_N: constexpr, BLOCK_T: constexpr,
           GROUP: constexpr) -> tensor:  # fmt: skip
    """Output and row tile of a program: GROUP output tiles walk the rows together, for L2."""
    rows = tl.cdiv(tokens, BLOCK_T)
    outputs: constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = tile // (GROUP * rows) * GROUP
    height = tl.minimum(outputs - first, GROUP)
    inside = tile % (GROUP * rows)
    return first + inside % height, inside // height


@triton.jit
def _weights(places: tensor, start: tensor, K: constexpr, BLOCK_K: constexpr,
             STREAM: constexpr) -> tensor:  # fmt: skip
    """One step of the weight; zeros past its width."""
    policy: constexpr = "evict_first" if STREAM else ""
    if K % BLOCK_K != 0:
        inside = (start + tl.arange(0, BLOCK_K) < K)[None, :]
        return tl.load(places + start, mask=inside, other=0.0, eviction_policy=policy)
    return tl.load(places + start, eviction_policy=policy)


@triton.jit(do_not_specialize=["tokens"])
def invariant_linear_kernel(
    x_ptr: tensor,
    weight_ptr: tensor,
    bias_ptr: tensor,
    y_ptr: tensor,
    tokens: tensor,
    x_stride: tensor,
    weight_stride: tensor,
    N: constexpr,
    K: constexpr,
    BLOCK_N: constexpr,
    BLOCK_T: constexpr,
    BLOCK_K: constexpr,
    GROUP: constexpr,
    STREAM: constexpr,
    STAGES: constexpr,
) -> None:
    """One program per tile of outputs, the weight as the left operand; steps of zeros change no bit."""
    tile_n, tile_t = _place(tl.program_id(0), tokens, N, BLOCK_N, BLOCK_T, GROUP)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_K)
    here = tl.minimum(outputs, N - 1).to(tl.int64) * weight_stride
    weights = weight_ptr + here[:, None] + cols[None, :]
    columns = x_ptr + (rows.to(tl.int64) * x_stride)[None, :] + cols[:, None]
    real = (rows < tokens)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _weights(weights, start, K, BLOCK_K, STREAM)
        mask = real
        if K % BLOCK_K != 0:
            mask = mask & (start + cols < K)[:, None]
        x = tl.load(columns + start, mask=mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    inside = (outputs < N)[:, None] & real
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        # Not acc + bias: if one step covers K, the compiler would start that product's sum at the bias.
        acc = tl.fma(acc, 1.0, bias[:, None])
    places = y_ptr + rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(places, acc.to(y_ptr.dtype.element_ty), mask=inside)


def default_tiles(
    num_rows: int, out_features: int, in_features: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Tile choices for an H200, in 16 bits from ``TILE_LIST``: they change speed, never a bit.

    Of more than 256 rows the widest tile, if it makes enough programs and no step needs a mask, for which it
    has no registers left; in four stages if shared memory holds them, from compute capability 9.0 on.
    """
    if itemsize == 4:
        return dict(zip(NAMES, FLOAT_TILES, strict=True))
    size = (out_features >= 8192) + (out_features >= 16384)
    place = next((places[size] for most, places in _BY_ROWS if num_rows <= most), None)
    if place is None:
        place = _MANY
        outputs, rows, step, *_ = TILE_LIST[_WIDEST]
        if (
            triton.cdiv(out_features, outputs) * triton.cdiv(num_rows, rows) >= _FULL
            and not in_features % step
        ):
            place = _DEEPEST if has_descriptors(device) else _WIDEST
    return dict(zip(NAMES, TILE_LIST[place], strict=True))


def invariant_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The PyTorch reference of :func:`invariant_linear`.

    On a CPU the order of a matrix library's sums depends on the number of rows too, so every row, copied to
    its own address, is one matrix-vector product.
    """
    wide = weight.float()
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for row in range(x.shape[0]):
        y[row] = torch.mv(wide, x[row].float().clone())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = x W^T + b; to the bit, a row of y depends on its row of x alone, for any number of rows.

    Shown on an H200 for fp16 and bf16 with every tile choice of ``TILE_LIST``: both kinds of tensor-core
    instructions give the same bits. The reference has this property too.

    Args:
        x: [M, K] fp16, bf16 or fp32, any M.
        weight: [N, K], dtype of x.
        bias: [N] or None.
        tiles: ``BLOCK_N`` outputs, ``BLOCK_T`` rows, ``BLOCK_K`` columns per step, ``num_warps``,
            ``num_stages``.

    Returns:
        [M, N], dtype of x.
    """
    expect_rows("x", x)
    expect("weight", weight, (None, x.shape[1]), like=x)
    if bias is not None:
        expect("bias", bias, (weight.shape[0],), like=x)
    if not runs_on_gpu(x):
        return invariant_linear_reference(x, weight, bias)
    (num_rows, width), outputs = x.shape, weight.shape[0]
    choice = merge_tiles(default_tiles(num_rows, outputs, width, x.element_size(), x.device), tiles)
    y = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if y.numel():
        row_tiles = triton.cdiv(num_rows, choice["BLOCK_T"])
        invariant_linear_kernel[(triton.cdiv(outputs, choice["BLOCK_N"]) * row_tiles,)](
            *(x, weight, bias, y, num_rows, x.stride(0), weight.stride(0)),
            N=outputs,
            K=width,
            BLOCK_N=choice["BLOCK_N"],
            BLOCK_T=choice["BLOCK_T"],
            BLOCK_K=choice["BLOCK_K"],
            GROUP=8,
            STREAM=row_tiles == 1,
            STAGES=choice["num_stages"],
            num_warps=choice["num_warps"],
        )
    return y
