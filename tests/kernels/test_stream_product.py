"""The streaming product of few rows: the text that it embeds and its places, carried out lane by lane; how
stages are laid out; which products it takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.kernels.cache.cache_scales import CacheScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.product.few_rows import stream_loop as loops
from ingot.kernels.product.few_rows import stream_words
from ingot.kernels.product.few_rows.stream_product import (
    stream_gate_up,
    stream_linear,
    stream_loop,
    takes_heads,
    takes_stream,
)
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized, pack_words
from tests.kernels.warp_operations import carried_out

BRAIN = torch.bfloat16


def packed(
    outputs: int, columns: int, bits: int, group: int, seed: int = 0, symmetric: bool = False
) -> StoredWeight:
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (outputs, columns), generator=random).to(torch.uint8)
    fill = torch.full((outputs,), 1 << (bits - 1), dtype=torch.uint8)
    shape = (-(-columns // group), outputs) if group else (outputs,)
    scales = (torch.rand(shape, generator=random) + 0.5).to(BRAIN)
    zeros = torch.randint(0, 16, shape, generator=random).to(torch.uint8) if group and not symmetric else None
    return StoredWeight(pack_words(numbers, bits, group, fill), columns, scales, zeros, bits, group)


def text(bits: int, part: int, half: int) -> str:
    return str(getattr(stream_words, f"_{bits}_{part}{half}").value)


def by_lanes(x: torch.Tensor, weight: StoredWeight) -> np.ndarray:
    """[N, 8] of one warp that takes every chunk: by the layout's words, and places as the kernel has them."""
    parts, lane = 16 // weight.bits, np.arange(32)
    groups = 256 // weight.group if weight.group else 1
    words = weight.values.numpy().view(np.uint32)  # [rows, words / 2]
    flat = words.reshape(words.shape[0] // 16, -1)
    pairs = x.view(torch.int32).numpy().view(np.uint32)
    assert weight.scales is not None
    wide = weight.scales.double().numpy()
    zeros = torch.full(weight.scales.shape, 8) if weight.zeros is None else weight.zeros
    result = np.zeros((weight.out_features, 8))
    for block in range(flat.shape[0]):
        for chunk in range(flat.shape[1] // 512):
            sums = [[np.zeros(32) for _ in range(4)] for _ in range(groups)]
            for piece in range(2):
                for half in range(2):
                    at = chunk * 512 + piece * 256 + half * 128 + lane * 4
                    own = [flat[block, at + i] for i in range(4)]
                    for part in range(parts):
                        column = chunk * 64 * parts + part * 64 + piece * 32 + lane % 4 * 8
                        columns = [pairs[lane // 4, column // 2 + i] for i in range(4)]
                        group = part * groups // parts
                        less = []
                        if weight.bits == 4:
                            both = zeros.numpy()[chunk * groups + group, block * 16 : block * 16 + 16]
                            two = (0xC300C300 + both.astype(np.uint32) * 0x10001).reshape(8, 2)[lane // 4]
                            less = [two[:, 0], two[:, 0], two[:, 1], two[:, 1]]
                        sums[group] = carried_out(
                            text(weight.bits, part, half), [*own, *columns, *less, *sums[group]]
                        )
            for group, four in enumerate(sums):
                for i, values in enumerate(four):
                    row = block * 16 + lane // 4 * 2 + i // 2
                    scale = wide[chunk * groups + group, row] if weight.group else wide[row]
                    result[row, lane % 4 * 2 + i % 2] += values * scale
    return result


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 128, False), (4, 64, False), (4, 128, True), (8, 0, True)]
)
def test_embedded_products_are_those_of_the_stored_weight(bits: int, group: int, symmetric: bool) -> None:
    weight = packed(32, 256, bits, group, symmetric=symmetric)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)).to(BRAIN)
    wanted = dequantized(weight, torch.float64) @ x.double().T
    np.testing.assert_allclose(by_lanes(x, weight), wanted.numpy(), rtol=1e-12, atol=1e-9)


def test_every_thread_takes_16_neighbouring_bytes_of_its_own() -> None:
    layout = stream_words.stage_layout()
    seen = set()
    for warp in range(8):
        for lane in range(32):
            for register in range(16):
                row = column = 0
                for index, bases in (
                    (register, layout.reg_bases),
                    (lane, layout.lane_bases),
                    (warp, layout.warp_bases),
                ):
                    for bit, base in enumerate(bases):
                        row ^= base[0] * (index >> bit & 1)
                        column ^= base[1] * (index >> bit & 1)
                quarter, own = divmod(register, 4)
                piece, half = quarter >> 1, quarter & 1
                flat = row * 32 + column
                assert flat == warp * 512 + piece * 256 + half * 128 + lane * 4 + own
                seen.add(flat)
    assert len(seen) == 4096


@pytest.mark.parametrize(
    ("outputs", "columns", "span", "started", "tiles", "most"),
    [
        (6144, 4096, 4, 192, 192, 2),
        (4096, 4096, 0, 256, 256, 2),
        (4096, 14336, 0, 256, 256, 2),
        (28672, 4096, 896, 264, 896, 7),
        (32, 256, 0, 2, 2, 1),
    ],
)
def test_multiprocessors_have_equal_shares(
    outputs: int, columns: int, span: int, started: int, tiles: int, most: int
) -> None:
    """Programs that are 132 apart share a multiprocessor."""
    loop, programs = stream_loop(outputs, columns, 4, 128, span, 264)
    assert (programs, loop.TILES) == (started, tiles)
    every = [range(program, tiles, programs) for program in range(programs)]
    assert sorted(tile for share in every for tile in share) == list(range(tiles))
    assert max(len(share) for share in every) == loop.PER
    shares = [sum(len(every[own]) for own in range(place, programs, 132)) for place in range(132)]
    assert max(shares) == most
    assert columns <= loop.STEPS * 2048


@pytest.mark.parametrize(("span", "blocks"), [(0, 6), (3, 6), (2, 12)])
def test_tiles_pair_the_blocks_that_belong_together(span: int, blocks: int) -> None:
    loop, _ = stream_loop(blocks * 16, 256, 4, 128, span)
    block = loops._block.fn
    own = [[block(tile, index, loop) for index in range(loop.BLOCKS)] for tile in range(loop.TILES)]
    assert sorted(block for pair in own for block in pair) == list(range(blocks))
    for pair in own:
        assert not span or (pair[1] - pair[0] == span and pair[0] // span % 2 == 0)


def test_on_the_cpu_the_reference_answers() -> None:
    weight, x = packed(32, 256, 4, 128), torch.randn(1, 256).to(BRAIN)
    whole = x.double() @ dequantized(weight, torch.float64).T
    bias, added = torch.full((32,), 2.0, dtype=BRAIN), torch.ones(1, 32, dtype=BRAIN)
    torch.testing.assert_close(stream_linear(x, weight, bias, added).double(), whole + 3, rtol=1e-2, atol=0.5)
    gate, up = whole.chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(stream_gate_up(x, weight).double(), wanted, rtol=3e-2, atol=50.0)


def test_which_products_stream() -> None:
    x, weight = torch.zeros(1, 256, dtype=BRAIN), packed(32, 256, 4, 128)
    assert takes_stream(weight, BRAIN)
    assert takes_stream(packed(32, 14336, 8, 0), BRAIN)
    assert not takes_stream(weight, torch.float16)
    assert not takes_stream(packed(32, 256, 4, 32), BRAIN)
    assert not takes_stream(packed(48, 256, 4, 128), BRAIN)
    assert not takes_stream(packed(32, 28672, 8, 0), BRAIN)
    assert not takes_stream(replace(weight, order=torch.arange(256, dtype=torch.int32)), BRAIN)
    with pytest.raises(KernelArgumentError, match="number of rows"):
        stream_linear(torch.zeros(2, 256, dtype=BRAIN), weight)
    with pytest.raises(KernelArgumentError, match="cannot read"):
        stream_gate_up(x, packed(32, 256, 4, 32))
    with pytest.raises(KernelArgumentError, match="cannot normalise"):
        stream_linear(x, weight, norm=torch.ones(256, dtype=BRAIN), eps=1e-5)


def place_of(heads: QkvHeads, width: int, dtype: torch.dtype = BRAIN, **parts: Any) -> Placement:
    keys = torch.zeros(4, heads.num_kv_heads, 16, heads.head_dim, dtype=dtype)
    cache = PagedCache(keys, keys.clone())
    tokens = TokenPlaces(*torch.zeros(3, 1, dtype=torch.int64).unbind())
    table = torch.zeros(8, width) if width else None
    return Placement(table, tokens, replace(cache, **parts), heads)


def test_which_heads_are_placed() -> None:
    assert takes_heads(place_of(QkvHeads(4, 2, 128), 128))
    assert takes_heads(place_of(QkvHeads(4, 2, 64), 64))
    assert not takes_heads(place_of(QkvHeads(4, 2, 128), 64))  # half of a head is rotated
    assert not takes_heads(place_of(QkvHeads(4, 2, 128), 0))
    assert not takes_heads(place_of(QkvHeads(4, 2, 80), 80))  # no whole blocks
    assert not takes_heads(place_of(QkvHeads(4, 2, 128, 2048), 128))
    assert not takes_heads(place_of(QkvHeads(4, 2, 128), 128, torch.float16))
    scales = CacheScales(*torch.ones(2, 4, 2, 16).unbind())
    assert not takes_heads(place_of(QkvHeads(4, 2, 128), 128, scales=scales))
