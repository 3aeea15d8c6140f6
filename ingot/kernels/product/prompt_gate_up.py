"""The gate and up product of a prompt's rows, or a plain MLP's up product, on Hopper, in 16 bits, with the
activation in its epilogue.

One warp of a program copies rows and weights to shared memory (TMA). Two groups of four warps, of many rows
three, have 64 rows of a tile each, and beside one another the sums of 128 outputs of the gate and the same
ones of up: what is written is half as wide as the product, which is not read again. Of a plain MLP two have
the sums of 256 outputs with the bias, and compute GELU of them beside the next tile's products
(prompt_dense_loop.py).

    if takes_gate_up(x, weight): y = prompt_gate_up(x, weight)
    if takes_up(x, weight): y = prompt_up(x, weight, bias)
"""

from __future__ import annotations

import functools

import torch
import triton

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.activation.plain_activation import plain_activation
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_rows, multiprocessors, runs_on_gpu
from ingot.kernels.product.prompt_dense_loop import COLS, OUTPUTS, ROWS, DenseLoop, prompt_gate_up_kernel
from ingot.kernels.product.prompt_epilogue import describable, descriptor, is_hopper
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

# With fewer rows, or emptier last tiles, the library was faster: `takes_gate_up`, `takes_up`.
LEAST_ROWS, LEAST_FULL = 1024, 0.95
LEAST_ROWS_UP, LEAST_FULL_UP = 2048, 0.88
# Or of so many, which one or two tiles of rows hold almost without a rest.
FEW_ROWS, LEAST_FULL_FEW = (range(96, 129), range(240, 257)), 0.8
# Gate and up in tiles of 192 rows: 3 % faster with 8192 rows, but with 2048 no faster than in tiles of 128.
LEAST_ROWS_TALL = 4096
TALL, SHORT = 30, 22  # time of a tile of 192 and of 128 rows
TWO = DenseLoop(GROUPS=2, STAGES=4, SPAN=16)
THREE = DenseLoop(GROUPS=3, STAGES=3, SPAN=11)


def takes_gate_up(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is the faster way for these rows and this weight (benchmarks/prompt_gate_up.py): on
    Hopper, in bf16, of many rows, or of few in full tiles, and whole tiles of outputs, which descriptors can
    read and which keep most programs busy to the end.
    """
    few = any(len(x) in rows for rows in FEW_ROWS)
    if (len(x) < LEAST_ROWS and not few) or weight.dtype != torch.bfloat16 or not is_hopper(weight.device):
        return False
    least = LEAST_FULL_FEW if few else LEAST_FULL
    return _busy_share(x, weight) >= least and _whole(weight) and describable(x, weight)


def takes_up(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """The same of a product with GELU, in fp16 or bf16."""
    if len(x) < LEAST_ROWS_UP or weight.dtype.itemsize != 2 or not is_hopper(weight.device):
        return False
    return _busy_share(x, weight) >= LEAST_FULL_UP and _whole(weight) and describable(x, weight)


def reads_up(stride: int, outputs: int, weight: torch.Tensor) -> bool:
    """Whether :func:`prompt_up` can read new rows that begin ``stride`` values apart, of a ``weight`` with so
    many outputs: on Hopper, in fp16 or bf16.
    """
    itemsize = weight.dtype.itemsize
    whole = outputs % (2 * OUTPUTS.value) == 0 and stride * itemsize % DESCRIPTOR_ALIGNMENT == 0
    return whole and itemsize == 2 and is_hopper(weight.device)


def _busy_share(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of the multiprocessors' time while the kernel runs: the last tiles keep few of them busy."""
    tiles, programs = triton.cdiv(len(x), 128) * (weight.shape[0] // 256), multiprocessors(weight.device)
    return tiles / (programs * max(triton.cdiv(tiles, programs), 1))


def _whole(weight: torch.Tensor) -> bool:
    """Whether there are whole tiles of outputs."""
    return weight.shape[0] % (2 * OUTPUTS.value) == 0


def prompt_gate_up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = cast(silu(cast(x G^T))) * cast(x U^T): the product and ``silu_mul`` of it, rounded alike.

    Args:
        x: [T, K] fp16 or bf16, any T.
        weight: [2 I, K], dtype of x: the gate G, then U; I is a multiple of 128.

    Returns:
        [T, I], dtype of x.
    """
    expect_rows("x", x)
    expect("weight", weight, (None, x.shape[1]), like=x)
    if weight.shape[0] % (2 * OUTPUTS.value):
        raise KernelArgumentError(
            "weight has no whole tiles", seen=weight.shape[0], allowed="multiples of 256"
        )
    if not runs_on_gpu(x):
        return silu_mul_reference(x @ weight.t())
    return _launched(x, weight, None, OUTPUTS.value)


def prompt_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """y = cast(gelu(cast(x W^T + b))): the product and exact GELU of it, rounded alike.

    Args:
        x: [T, K] fp16 or bf16, any T.
        weight: [I, K], dtype of x; I is a multiple of 256.
        bias: [I], dtype of x.

    Returns:
        [T, I], dtype of x.
    """
    expect_rows("x", x)
    expect("weight", weight, (None, x.shape[1]), like=x)
    inner = len(weight)
    expect("bias", bias, (inner,), like=x)
    if inner % (2 * OUTPUTS.value):
        raise KernelArgumentError("weight has no whole tiles", seen=inner, allowed="multiples of 256")
    if not runs_on_gpu(x):
        return plain_activation(torch.nn.functional.linear(x, weight, bias), "gelu")
    return _launched(x, weight, bias, 2 * OUTPUTS.value)


@functools.lru_cache(maxsize=4096)
def tall_tiles(rows: int, across: int, programs: int) -> int:
    """How many tiles of rows have 192 of them, so that all ``programs`` end early; the other rows are tiles
    of 128. ``across``: tiles of outputs.
    """

    def time(tall: int) -> int:  # of the first program, which has most tiles of either kind
        every = (tall + triton.cdiv(max(rows - 192 * tall, 0), 128)) * across
        own = triton.cdiv(tall * across, programs)
        return TALL * own + SHORT * (triton.cdiv(every, programs) - own)

    return min(range(triton.cdiv(rows, 192), -1, -1), key=time)


def _launched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int) -> torch.Tensor:
    """The result [T, I], a tile's ``width`` outputs of it; without ``bias`` half as wide as the product."""
    inner, rows, programs = len(weight) // (2 if bias is None else 1), len(x), multiprocessors(x.device)
    y, loop, tall = x.new_empty((rows, inner)), TWO, triton.cdiv(rows, 2 * ROWS.value)
    if bias is None and rows >= LEAST_ROWS_TALL:
        loop, tall = THREE, tall_tiles(rows, inner // width, programs)
    if y.numel():
        short = triton.cdiv(max(rows - tall * loop.GROUPS * ROWS.value, 0), 2 * ROWS.value)
        prompt_gate_up_kernel[(min((tall + short) * (inner // width), programs),)](
            descriptor(x, ROWS.value, COLS.value),
            descriptor(weight, OUTPUTS.value, COLS.value),
            descriptor(y, ROWS.value, OUTPUTS.value if bias is None else COLS.value),
            bias,
            rows,
            inner,
            x.shape[1],
            tall,
            LOOP=loop,
            num_warps=4,
        )
    return y
