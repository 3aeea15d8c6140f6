"""The warps of packed_prompt.py's kernel that end a product with gate and up: SiLU of the gates times up.

The groups of warps that multiply leave a tile's sums in shared memory and begin the next tile. These warps
compute the activation beside its products, a few rows at a time, in the same place.

    gl.warp_specialize([..., (apply_gates, (everything, LOOP))], ...)
"""

from __future__ import annotations

# mypy: disable-error-code="misc"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import constexpr, tensor

from ingot.kernels.product.packed.prompt_tiles import tile_corner, tile_count
from ingot.kernels.product.prompt_epilogue import gated

GATE_ROWS = 16  # at once: two warps have 24 registers per thread
STAGED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_ROWS = gl.constexpr(GATE_ROWS)


@gluon.jit
def apply_gates(everything: tensor, LOOP: constexpr) -> None:
    """Of every tile and both groups: 64 sums of a row are four times eight gates and their ups."""
    _x_desc, _w_desc, y_desc, _xs, _words, staged, bars, places = everything
    _ready, _free, _stored, _loaded, filled, emptied = bars
    WIDTH: constexpr = LOOP.BLOCK_N // 4
    STEPS: constexpr = LOOP.BLOCK_T // _ROWS
    LOADS: constexpr = gl.BlockedLayout([1, 16], [8, 4], [2, 1], [1, 0])
    sums = staged._reinterpret(y_desc.dtype, [2 * STEPS, _ROWS, 2 * WIDTH], STAGED)
    results = staged._reinterpret(y_desc.dtype, [4 * STEPS, _ROWS, WIDTH], y_desc.layout)
    phase = 0
    for tile in range(gl.program_id(0), tile_count(places, LOOP), gl.num_programs(0)):
        first_token, first_output = tile_corner(tile, places, LOOP)
        for group in gl.static_range(2):
            mbarrier.wait(filled.index(group), phase)
            for step in range(STEPS):
                both = sums.index(group * STEPS + step).load(LOADS)
                pairs = gl.permute(gl.reshape(both, (_ROWS, WIDTH // 8, 2, 8)), (0, 1, 3, 2))
                gate, up = gl.split(pairs)
                y = gl.reshape(gated(gate.to(gl.float32), up.to(gl.float32), y_desc.dtype), (_ROWS, WIDTH))
                result = results.index(2 * (group * STEPS + step))
                result.store(y)
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    y_desc, [first_token + step * _ROWS, first_output + group * WIDTH], result
                )
            tma.store_wait(0)
            mbarrier.arrive(emptied.index(group), count=1)
        phase ^= 1
