"""What products of many rows on Hopper share: activations of their sums, and what descriptors can read.

if is_hopper(x.device) and describable(x): ...
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr, tensor

from ingot.kernels.kernel_checks import described_gpu
from ingot.kernels.tiles.product_tiles import DESCRIPTOR_ALIGNMENT

# Q of `gelu`, times -log2(e)
_GELU_0 = gl.constexpr(-2.3022072315216064)
_GELU_1 = gl.constexpr(-0.10483857989311218)
_GELU_2 = gl.constexpr(9.559298632666469e-05)
_GELU_3 = gl.constexpr(0.00015938939759507775)
_GELU_4 = gl.constexpr(-1.145242822531145e-05)
_GELU_5 = gl.constexpr(3.85044870654383e-07)
_GELU_6 = gl.constexpr(-5.209906284164845e-09)
_MINUS_LOG2_E = gl.constexpr(-1.4426950408889634)


@gluon.jit
def gated(gate: tensor, up: tensor, DTYPE: constexpr) -> tensor:
    """SiLU(gate) · up of two sums in fp32, rounded as ``silu_mul`` rounds them."""
    gate = gate.to(DTYPE).to(gl.float32)
    gate = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
    return (gate * up.to(DTYPE).to(gl.float32)).to(DTYPE)


@gluon.jit
def quickly_gated(gate: tensor, up: tensor, DTYPE: constexpr) -> tensor:
    """The same by approximate instructions: within 3e-7 before each rounding."""
    gate = gate.to(DTYPE).to(gl.float32)
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * _MINUS_LOG2_E], gl.float32, is_pure=True, pack=1
    )
    gate = gate * _reciprocal(1.0 + power)
    return gate.to(DTYPE) * up.to(DTYPE)


@gluon.jit
def _reciprocal(x: tensor) -> tensor:
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def store_gated(sums: tensor, y_desc: tensor, piece: tensor, row: tensor, output: tensor) -> None:
    """Write SiLU(gate) · up of sums whose first half are gates."""
    gate, up = _halves(sums)
    y = quickly_gated(gate, up, y_desc.dtype)
    tma.store_wait(0)
    piece.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, output], piece)


@gluon.jit
def _halves(x: tensor) -> tensor:
    """Columns of x in two parts, in order."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def quarters(x: tensor) -> tensor:
    """Columns of x in four parts, in order."""
    left, right = _halves(x)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return first, second, third, fourth


@gluon.jit
def gelu(x: tensor) -> tensor:
    """x · Φ(x) within 7e-8 plus roundings: Φ(x) = 1 / (1 + exp(-x · Q(x²))), which takes half of erf's time.
    Q falls on beyond the values that it was fitted to: Φ becomes 0 or 1.
    """
    t = x * x
    q = _GELU_6
    q = q * t + _GELU_5
    q = q * t + _GELU_4
    q = q * t + _GELU_3
    q = q * t + _GELU_2
    q = q * t + _GELU_1
    q = q * t + _GELU_0
    return x * _reciprocal(1.0 + gl.exp2(x * q))


@gluon.jit
def store_bent(x: tensor, y_desc: tensor, piece: tensor, row: tensor, output: tensor) -> None:
    """Write GELU of a quarter, once the last but one is out of its place in shared memory."""
    y = gelu(x.to(gl.float32)).to(y_desc.dtype)
    tma.store_wait(1)
    piece.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, output], piece)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has the instructions: compute capability 9."""
    device = described_gpu(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def describable(*tensors: torch.Tensor) -> bool:
    """Whether descriptors read these rows: they start at multiples of 16 bytes."""
    return all(
        start % DESCRIPTOR_ALIGNMENT == 0
        for tensor in tensors
        for start in (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
    )


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of at least 32 columns of 16 bits, which shared memory holds in its swizzled order."""
    swizzle = min(columns * tensor.element_size(), 128)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
