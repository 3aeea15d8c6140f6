"""Causal attention of mixed batches over the paged cache against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.attention.prefill_reference import NO_TILE
from tests.kernels.flat_calls import prefill_attention, prefill_attention_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, in_fp32, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case

LENGTHS = [19, 0, 70, 33, 40]  # keys of each request
QUERIES = [19, 2, 23, 1, 0]  # new tokens: a whole prompt, padding, a chunk on cached keys, a decode, none
CASES = {
    # heads, kv_heads, head_dim, block_size, window
    "mha": (2, 2, 64, 64, 0),
    "small_blocks": (1, 1, 128, 4, 0),
    "window": (2, 1, 48, 16, 9),
    "wide_window": (1, 1, 64, 64, 37),
    "gqa": (4, 2, 128, 128, 0),
    "gqa_7": (7, 1, 80, 32, 0),
    "mqa": (3, 1, 96, 8, 0),
    "tiny_head": (2, 2, 8, 16, 0),
}


def starts(queries: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *queries], device=device).cumsum(0).int()


def expected64(
    q: torch.Tensor, case: PagedCase, queries: list[int], scale: float, window: int
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    begin = 0
    for row, count in enumerate(queries):
        length = len(case.keys[row])
        if length and count:
            span = slice(begin, begin + count)
            positions = torch.arange(length - count, length, device=q.device)
            out[span] = attention64(q[span], case.keys[row], case.values[row], positions, scale, window)
        begin += count
    return out


@pytest.mark.stays(*in_fp32(CASES, halves=("mha", "gqa", "tiny_head")))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_prefill_attention(impl: Implementation, dtype: torch.dtype, name: str) -> None:
    heads, kv_heads, head_dim, block_size, window = CASES[name]
    case = paged_case(
        LENGTHS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=impl.device,
    )
    q = normal(sum(QUERIES), heads, head_dim, dtype=dtype, device=impl.device)
    scale = head_dim**-0.5
    out = impl(prefill_attention, prefill_attention_triton)(
        q,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        starts(QUERIES, impl.device),
        case.seq_lens,
        max(QUERIES),
        scale,
        window,
    )
    assert_near(out, expected64(q, case, QUERIES, scale, window))
    assert (out[19:21] == 0).all(), "a padding row is zeros"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [0, 21])
def test_chunked_is_whole(impl: Implementation, window: int) -> None:
    case = paged_case([50], kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32, device=impl.device)
    q = normal(50, 2, 32, dtype=torch.float32, device=impl.device)
    op = impl(prefill_attention, prefill_attention_triton)

    def run(begin: int, end: int) -> torch.Tensor:
        lengths = torch.tensor([end], dtype=torch.int32, device=impl.device)
        tables = case.block_tables
        bounds = starts([end - begin], impl.device)
        return op(
            q[begin:end], case.key_cache, case.value_cache, tables, bounds, lengths, end - begin, 0.2, window
        )

    whole = run(0, 50)
    assert_near(whole, expected64(q, case, [50], 0.2, window))
    pieces = torch.cat([run(0, 7), run(7, 24), run(24, 49), run(49, 50)])
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (64, 16)])
def test_other_tiles_and_strided_queries(impl: Implementation, block_m: int, block_n: int) -> None:
    case = paged_case(
        [40, 66], kv_heads=1, head_dim=16, block_size=32, dtype=torch.float16, device=impl.device
    )
    wide = normal(70, 3, 16, dtype=torch.float16, device=impl.device)
    out = impl(prefill_attention, prefill_attention_triton)(
        wide[:, :2],
        case.key_cache,
        case.value_cache,
        case.block_tables,
        starts([4, 66], impl.device),
        case.seq_lens,
        66,
        0.25,
        tiles={"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 1},
    )
    assert_near(out, expected64(wide[:, :2], case, [4, 66], 0.25, 0))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "window"), [(0, 0), (2, 0), (2, 9), (5, 0)])
def test_a_list_of_tiles(impl: Implementation, dtype: torch.dtype, first: int, window: int) -> None:
    """Requests from ``first`` on, in any order, with room left in the list; other rows stay as they are."""
    case = paged_case(LENGTHS, kv_heads=1, head_dim=32, block_size=16, dtype=dtype, device=impl.device)
    q = normal(sum(QUERIES), 2, 32, dtype=dtype, device=impl.device)
    bounds, rows = starts(QUERIES, impl.device), 16
    tiles = [(row, at) for row in range(first, 5) for at in range(-(-QUERIES[row] // rows))]
    tiles = [*tiles[1::2], (0, NO_TILE), *tiles[::2], (4, NO_TILE)]
    listed = torch.tensor([(*tile, 0, 1) for tile in tiles], dtype=torch.int32, device=impl.device)
    out = torch.full_like(q, 7.0)
    impl(prefill_attention, prefill_attention_triton)(
        *(q, case.key_cache, case.value_cache, case.block_tables, bounds, case.seq_lens, 64, 0.2, window),
        tiles={"BLOCK_M": rows},
        out=out,
        tile_list=listed,
    )
    begin = int(bounds[first])
    assert (out[:begin] == 7.0).all()
    assert_near(out[begin:], expected64(q, case, QUERIES, 0.2, window)[begin:])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_tokens(impl: Implementation) -> None:
    case = paged_case([9], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=impl.device)
    out = impl(prefill_attention, prefill_attention_triton)(
        torch.zeros(0, 2, 16, device=impl.device),
        case.key_cache,
        case.value_cache,
        case.block_tables,
        starts([0], impl.device),
        case.seq_lens,
        0,
        1.0,
    )
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q", torch.zeros(3, 4, 4), "head_dim is out of range"),
        ("value_cache", torch.zeros(5, 2, 9, 16), "value_cache has the wrong shape"),
        ("query_start", torch.zeros(2, dtype=torch.int32), "query_start has the wrong shape"),
        ("query_start", torch.zeros(3, dtype=torch.int64), "query_start has the wrong dtype"),
        ("block_tables", torch.zeros(3, 3, dtype=torch.int32), "block_tables has the wrong shape"),
        ("seq_lens", torch.tensor(0, dtype=torch.int32), "seq_lens has the wrong shape"),
        ("max_query_len", -1, "max_query_len is out of range"),
        ("tile_list", torch.zeros(3, 3, dtype=torch.int32), "tile_list has the wrong shape"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    arguments = {
        "q": torch.zeros(3, 4, 16),
        "key_cache": torch.zeros(5, 2, 8, 16),
        "value_cache": torch.zeros(5, 2, 8, 16),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
        "max_query_len": 2,
        "scale": 1.0,
    }
    prefill_attention(**arguments)
    with pytest.raises(IngotError, match=message):
        prefill_attention(**{**arguments, field: value})
