"""Numbers of a KV cache in 8 bits, made wide in the registers of those that read it.

Owns the instructions, and where a tile's scales lie. Knows no attention; cache_round.py makes the numbers,
and cache_scales.py has the rule in plain PyTorch.

    k = widened(k, tl.float16, ASM)

A signed byte with its top bit turned is the byte plus 128; below the point of a power of two it is that
power plus as much, exactly, and one difference leaves the byte. The compiler's own way takes an instruction a
number on a unit that has a quarter of the others' lanes. Two numbers of e4m3 become two of fp16 in one
instruction there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.cache.paged_tile import tile_rows

_TURN = ".reg .b32 t; xor.b32 t, {source}, 0x80808080;"


def _halves() -> tl.constexpr:
    """Four bytes of one register as fp16, two a register: 1024 + 128 + byte, less 1152."""
    return tl.constexpr(
        "{ " + _TURN.format(source="$2") + " .reg .b32 a, b, z; mov.b32 z, 0x64806480;"
        " prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342;"
        " sub.f16x2 $0, a, z; sub.f16x2 $1, b, z; }"
    )


def _in_float32(source: str) -> str:
    """Four bytes as fp32 in e, f, g, h: 2^23 + 128 + byte, less 2^23 + 128."""
    parts = [
        f" prmt.b32 {raw}, t, 0x4B000000, 0x744{place}; mov.b32 {wide}, {raw};"
        f" sub.f32 {wide}, {wide}, 0f4B000080;"
        for place, (raw, wide) in enumerate(zip("abcd", "efgh", strict=True))
    ]
    return _TURN.format(source=source) + " .reg .b32 a, b, c, d; .reg .f32 e, f, g, h;" + "".join(parts)


def _brains() -> tl.constexpr:
    """Four bytes as bf16, two a register, by way of fp32: below a bf16 number's point lie seven bits."""
    body = _in_float32("$2") + " cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g;"
    return tl.constexpr("{ " + body + " }")


def _floats() -> tl.constexpr:
    """Four bytes as fp32."""
    body = _in_float32("$4") + " mov.b32 $0, e; mov.b32 $1, f; mov.b32 $2, g; mov.b32 $3, h;"
    return tl.constexpr("{ " + body + " }")


_HALVES, _BRAINS, FOUR_FLOATS = _halves(), _brains(), _floats()
_E4M3 = tl.constexpr(  # four bytes as fp16
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
LEAST_SCALE = tl.constexpr(1e-30)  # below any scale


@triton.jit
def widened(x: tl.tensor, DTYPE: tl.constexpr, ASM: tl.constexpr, ORDER: tl.constexpr = False) -> tl.tensor:
    """Numbers (int8, fp8e4nv) of any shape in DTYPE (fp16, bf16, fp32), exactly. ASM: without it in the
    compiler's own way, as e4m3 is but for ORDER.

    A compiler that sees that a product's operand was of 8 bits gives some tensor-core instructions columns in
    another order, to save shuffles; ORDER hides it, so that sums are those of an operand that was wide.
    """
    if x.dtype == tl.float8e4nv:
        if ASM and ORDER:
            x = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [x], tl.float16, is_pure=False, pack=4)
        wide = x.to(DTYPE)
    elif not ASM:
        wide = x.to(tl.float32).to(DTYPE)
    elif tl.float16 == DTYPE:
        wide = tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [x], tl.float16, is_pure=not ORDER, pack=4)
    elif tl.bfloat16 == DTYPE:
        wide = tl.inline_asm_elementwise(_BRAINS, "=r,=r,r", [x], tl.bfloat16, is_pure=not ORDER, pack=4)
    else:
        wide = tl.inline_asm_elementwise(
            FOUR_FLOATS, "=r,=r,=r,=r,r", [x], tl.float32, is_pure=not ORDER, pack=4
        )
    return wide


@triton.jit
def tile_scales(
    scale_ptr: tl.tensor,
    place: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Scales [BLOCK_N] of tokens start, start + 1, ...; 0 from ``end`` on.

    ``place`` is the tile's element offset in the cache, where it lies inside one block; strides are the
    cache's, which has HEAD_DIM elements for each scale.
    """
    order = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        places = place // HEAD_DIM + order
    else:
        rows = tile_rows(table_ptr, start, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
        places = rows // HEAD_DIM
    return tl.load(scale_ptr + places, mask=start + order < end, other=0.0)


def knows_asm(cache: torch.Tensor) -> bool:
    """Whether kernels over a cache may use inline assembly: the interpreter, on CPU tensors, knows none."""
    return cache.device.type != "cpu"
