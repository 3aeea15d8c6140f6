"""The first half of a gated MLP on a few rows: norm, gate and up products, silu(gate) * up, in one kernel.

Owns the formula y = cast(silu(g)) * u with g, u = norm(x) Wg^T, norm(x) Wu^T, each rounded to the dtype, as
in gated_mlp.py. Knows no model.

    inner = small_gate_up(hidden, gate_up_weight, norm_weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_range,
    merge_tiles,
    runs_on_gpu,
)
from ingot.kernels.norm.rms_norm import rms_norm_triton
from ingot.kernels.overlap import launch_options, start_next
from ingot.kernels.product.fragment_kernels import fragment_gate_up
from ingot.kernels.product.matrix_product import even_share, matrix_shape, weight_pointers, weight_tile
from ingot.kernels.product.product_ends import split_pairs, store_activated
from ingot.kernels.product.small_linear import small_linear_reference
from ingot.kernels.product.small_product import (
    MAX_ROWS,
    expect_rows,
    num_programs,
    prepare_rows,
    product_shape,
    product_tile,
    small_tiles,
)
from ingot.kernels.tiles.product_tiles import settled, whole_chunks
from ingot.kernels.weight.stored_weight import BLOCK_ROWS, AnyWeight, StoredWeight, expect_weight, stored


@triton.jit
def _rows(tile: tl.tensor, INNER: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """The gate rows of a tile's outputs, then their up rows; the last again where there are no more."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    return tl.minimum(tile * PAIRS + lane % PAIRS, INNER - 1) + (lane // PAIRS) * INNER


@triton.jit
def small_gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    weight_stride: tl.tensor,
    norm_eps: tl.tensor,
    INNER: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N / 2 outputs of every row, a whole stride of programs apart."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    TILES: tl.constexpr = (INNER + PAIRS - 1) // PAIRS
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    token = tl.arange(0, 1)
    if OVERLAP == 2:
        start_next(OVERLAP)
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, x, rstd = prepare_rows(x_ptr, weight_ptr, weight_stride,
                              _rows(first, INNER, BLOCK_N), norm_ptr, norm_eps,
                              K, BLOCK_K, BLOCK_X, OVERLAP)  # fmt: skip
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows = _rows(tile, INNER, BLOCK_N)
        next_rows = _rows(tile + programs, INNER, BLOCK_N)
        has_next = tile + programs < TILES
        if OVERLAP == 4:  # noqa: SIM102 - one condition is known when compiling, the other is not
            if tile + programs >= TILES:
                start_next(OVERLAP)
        acc, w = product_tile(w, x, rstd, x_ptr, weight_ptr, weight_stride, rows, next_rows,
                              has_next, norm_ptr, K, BLOCK_N, BLOCK_K)  # fmt: skip
        gate, up = split_pairs(acc.to(dtype).to(tl.float32), PAIRS, 1)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        outputs = tile * PAIRS + tl.arange(0, PAIRS)
        inside = (outputs < INNER)[:, None] & (token < tokens)[None, :]
        tl.store(y_ptr + token[None, :] * INNER + outputs[:, None], (activated * up).to(dtype), mask=inside)


@triton.jit
def small_gate_up_matrix_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """SHARE outputs of every row, at most BLOCK_N / 2."""
    if OVERLAP == 2:
        start_next(OVERLAP)
    PAIRS: tl.constexpr = BLOCK_N // 2
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    start = tl.program_id(0) * SHARE
    lane = tl.arange(0, BLOCK_N) % PAIRS
    rows = tl.minimum(start + lane, INNER - 1) + (tl.arange(0, BLOCK_N) // PAIRS) * INNER
    live = None if SHARE == PAIRS else lane < SHARE
    acc = weight_tile(x_ptr, x_stride, None, 0, tokens, weight_ptr, weight_stride,
                      scale_ptr, scale_stride, zero_ptr, rows, live, 0, STEPS, K, BITS, GROUP, BLOCK_T,
                      BLOCK_N, BLOCK_K, PREFETCH, OVERLAP, ASM)  # fmt: skip
    if OVERLAP == 4:
        start_next(OVERLAP)
    store_activated(acc, start + tl.arange(0, PAIRS), tl.minimum(start + SHARE, INNER), y_ptr, tokens, INNER,
                    PAIRS, BLOCK_T)  # fmt: skip


def _matrix(x: torch.Tensor, weight: StoredWeight, y: torch.Tensor, choice: Mapping[str, int]) -> None:
    if choice["FRAGMENTS"]:
        fragment_gate_up(x, weight, y, choice)
        return
    share = even_share(y.shape[1], choice["BLOCK_N"] // 2, choice, x.device)
    small_gate_up_matrix_kernel[(triton.cdiv(y.shape[1], share),)](
        x,
        *weight_pointers(weight),
        y,
        x.shape[0],
        x.stride(0),
        INNER=y.shape[1],
        SHARE=share,
        **matrix_shape(choice, weight),
        **launch_options(choice, x.device),
    )


def small_gate_up_triton(
    x: torch.Tensor,
    weight: AnyWeight,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_gate_up`, unchecked."""
    weight = stored(weight)
    num_tokens, inner = x.shape[0], weight.out_features // 2
    defaults = small_tiles(num_tokens, weight, x.element_size(), x.device, inner % BLOCK_ROWS == 0)
    choice = settled(whole_chunks(merge_tiles(defaults, tiles), weight), pairs=True)
    expect_rows(choice, num_tokens)
    y = torch.empty((num_tokens, inner), dtype=x.dtype, device=x.device)
    if choice["BLOCK_T"] > 1 and y.numel():
        if norm_weight is not None:
            x, _ = rms_norm_triton(x, norm_weight, norm_eps, tiles={"OVERLAP": min(choice["OVERLAP"], 2)})
        _matrix(x, weight, y, choice)
    elif y.numel():
        tiles_to_do = triton.cdiv(inner, choice["BLOCK_N"] // 2)
        small_gate_up_kernel[(num_programs(choice, tiles_to_do, x.device),)](
            x,
            weight.values,
            norm_weight,
            y,
            num_tokens,
            weight.values.stride(0),
            norm_eps,
            INNER=inner,
            **product_shape(choice, weight),
            **launch_options(choice, x.device),
        )
    return y


def small_gate_up_reference(
    x: torch.Tensor, weight: AnyWeight, norm_weight: torch.Tensor | None = None, norm_eps: float = 0.0
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_gate_up`."""
    return silu_mul_reference(small_linear_reference(x, weight, norm_weight=norm_weight, norm_eps=norm_eps))


def small_gate_up(
    x: torch.Tensor,
    weight: AnyWeight,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = cast(silu(norm(x) Wg^T)) * (norm(x) Wu^T), for the few rows of a decode step (SwiGLU; Shazeer,
    2020).

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [2 I, K], dtype of x or stored in fewer bits: the gate's rows, then the up projection's.
        norm_weight: [K] or None; with it norm is RMSNorm, rounded as in :func:`rms_norm`.
        norm_eps: added to the mean square.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts gate and up rows, at least 2.

    Returns:
        [M, I], dtype of x. How a row's bits depend on M: see :func:`small_linear`.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    weight = stored(weight)
    expect_weight(weight, x)
    if weight.out_features % 2:
        raise KernelArgumentError(
            "weight must hold two halves", seen=weight.out_features, allowed="an even height"
        )
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if runs_on_gpu(x):
        return small_gate_up_triton(x, weight, norm_weight, norm_eps, tiles)
    return small_gate_up_reference(x, weight, norm_weight, norm_eps)
