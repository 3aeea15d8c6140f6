"""Prefill attention whose programs share the keys of a tile: the same output, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot import SamplingParams
from ingot.errors import IngotError
from ingot.kernels.attention import prefill_attention as launcher
from ingot.kernels.attention.attention_arguments import TileList
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.attention.prefill_reference import NO_TILE
from ingot.kernels.tiles.prefill_tiles import LEAST_PART, most_parts, parts_of
from ingot.layers import attention as layer
from ingot.layers.forward_batch import LayerCache
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledRequest, layout_of
from ingot.runtime.step.step_buffer import StepBuffer
from tests.kernels.flat_calls import prefill_attention, prefill_attention_triton
from tests.kernels.narrow_cache_case import narrow_case
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case
from tests.kernels.test_int8_heads import assert_heads, receivers
from tests.kernels.test_prefill_attention import CASES, starts
from tests.unit.test_mixed_step import small_attention

ROWS = 16
LENGTHS = [9, 300, 150, 70]
QUERIES = [9, 20, 16, 5]  # a prompt that is left alone; two tiles on cached keys, one, one
# Request, tile, parts: in four; in seven, of which some have no key; in three; whole.
TILES = [(1, 0, 4), (1, 1, 7), (2, 0, 3), (3, 0, 1)]
TILE_LIST = [(request, tile, part, parts) for request, tile, parts in TILES for part in range(parts)]
PARTS = 14
CAP = 5.0


def made(
    impl: Implementation, name: str, dtype: torch.dtype, kind: torch.dtype | None = None
) -> tuple[PagedCase, torch.Tensor]:
    heads, kv_heads, head_dim, block_size, _ = CASES[name]
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = paged_case(LENGTHS, **sizes, dtype=torch.float32 if kind else dtype, device=impl.device)
    q = normal(sum(QUERIES), heads, head_dim, dtype=dtype, device=impl.device)
    return (case if kind is None else narrow_case(case, kind)), q


def attend(
    impl: Implementation, case: PagedCase, q: torch.Tensor, window: int, **options: Any
) -> torch.Tensor:
    arrivals = torch.zeros(PARTS * q.shape[1], dtype=torch.int32, device=q.device)
    listed = [*TILE_LIST, (0, NO_TILE, 0, 1), (3, NO_TILE, 0, 1)]
    place = (case.key_cache, case.value_cache, case.block_tables, starts(QUERIES, impl.device), case.seq_lens)
    options = {"tiles": {"BLOCK_M": ROWS}, "parts": PARTS, "arrivals": arrivals, **options}
    out = impl(prefill_attention, prefill_attention_triton)(
        *(q, *place, max(QUERIES), q.shape[2] ** -0.5, window),
        tile_list=torch.tensor(listed, dtype=torch.int32, device=impl.device),
        **options,
    )
    assert not arrivals.any(), "the last to arrive leaves the counts at zero"
    return out


def expected64(q: torch.Tensor, case: PagedCase, window: int, softcap: float = 0.0) -> torch.Tensor:
    """Of the requests that are listed."""
    found, begin = [], QUERIES[0]
    for row, count in list(enumerate(QUERIES))[1:]:
        length = len(case.keys[row])
        positions = torch.arange(length - count, length, device=q.device)
        own = (q[begin : begin + count], case.keys[row], case.values[row], positions)
        found.append(attention64(*own, q.shape[2] ** -0.5, window, softcap))
        begin += count
    return torch.cat(found)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cap", [0.0, CAP])
def test_parts_meet(impl: Implementation, dtype: torch.dtype, name: str, cap: float) -> None:
    case, q = made(impl, name, dtype)
    out, window = torch.full_like(q, math.nan), CASES[name][4]
    assert attend(impl, case, q, window, out=out, softcap=cap) is out
    assert out[: QUERIES[0]].isnan().all(), "rows of the others stay as they are"
    assert_near(out[QUERIES[0] :], expected64(q, case, window, cap))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mha", "wide_window", "gqa_7"])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_parts_of_a_cache_in_8_bits(impl: Implementation, name: str, kind: torch.dtype) -> None:
    case, q = made(impl, name, torch.float16, kind)
    out, window = torch.full_like(q, math.nan), CASES[name][4]
    attend(impl, case, q, window, out=out, scales=case.scales)  # type: ignore[attr-defined]
    assert_near(out[QUERIES[0] :], expected64(q, case, window))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("static", [False, True])
def test_the_whole_tile_is_rounded_to_8_bits(impl: Implementation, static: bool) -> None:
    case, q = made(impl, "gqa", torch.float16)
    attended, (out, scales) = attend(impl, case, q, 0), receivers(q, static)
    attend(impl, case, q, 0, out=out, out_scales=scales)
    first = QUERIES[0]
    rows = int8_heads(out[first:], scales if static else scales[first:])
    assert_heads(rows, attended[first:], scales if static else None)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_arrivals_of_the_callers_own(impl: Implementation) -> None:
    case, q = made(impl, "mha", torch.float16)
    with_counts, listed = attend(impl, case, q, 0), torch.tensor(TILE_LIST, dtype=torch.int32)
    place = (case.key_cache, case.value_cache, case.block_tables, starts(QUERIES, impl.device), case.seq_lens)
    out = impl(prefill_attention, prefill_attention_triton)(
        *(q, *place, max(QUERIES), q.shape[2] ** -0.5),
        tiles={"BLOCK_M": ROWS},
        tile_list=listed.to(impl.device),
        parts=PARTS,
    )
    assert torch.equal(out[QUERIES[0] :], with_counts[QUERIES[0] :])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs in test_graphs.py")
def test_the_list_that_a_captured_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode, a prompt and a chunk in parts: by a step's own list the kernel gives what its twin does."""
    keys, counts, dtype = [6, 20, 900], [1, 20, 40], torch.float32
    case = paged_case(keys, kv_heads=2, head_dim=16, block_size=16, dtype=dtype)
    items = []
    for row, (seen, count) in enumerate(zip(keys, counts, strict=True)):
        blocks = case.block_tables[row, : -(-seen // 16)].tolist()
        own = Request(str(row), [0] * seen, SamplingParams(), 99, blocks=blocks)
        items.append(ScheduledRequest(own, seen - count, count, samples=True))
    buffer = StepBuffer(64, 4, 60, 4, torch.device("cpu"), 2, tile_rows=32, tile_parts=5)
    buffer.fill(layout_of(items, 16))
    buffer.upload()
    batch = buffer.padded_batch(64, 1024)
    attention, cache = small_attention("cpu", dtype, 0), LayerCache(case.key_cache, case.value_cache)
    query, used = normal(64, 4, 16, dtype=dtype), []
    expected = attention.attend(query, batch, cache)

    def kernel(*arguments: Any, listed: TileList, **options: Any) -> torch.Tensor:
        used.append((listed.parts, listed.tiles.tolist()))
        assert options["arrivals"] is batch.arrivals
        return launcher.prefill_attention_triton(*arguments, listed=listed, **options)

    monkeypatch.setattr(layer, "prefill_attention", kernel)
    found = attention.attend(query, batch, cache)
    ((parts, tiles),) = used
    assert parts == 5
    assert [tile for tile in tiles if tile[3] > 1] == [[2, at, part, 2] for at in (1, 0) for part in (0, 1)]
    assert_near(found[: sum(counts)], expected[: sum(counts)].double())
    assert not batch.arrivals.any()


def listed(keys: list[int], room: int, most: int) -> torch.Tensor:
    """A step's list of one tile a request, in descending order of keys, with some room left."""
    counts = [*enumerate(parts_of(keys, most))]
    found = [(request, 0, part, parts) for request, parts in counts for part in range(parts)]
    found += [(0, NO_TILE, 0, 1)] * (max(most, len(keys)) + room - len(found))
    return torch.tensor(found, dtype=torch.int32, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32, 128), (32, 8, 128), (28, 4, 128), (16, 8, 256)])
@pytest.mark.parametrize("kind", [None, torch.int8])
@pytest.mark.parametrize("longest", [4096, 32000])
@pytest.mark.parametrize("window", [0, 4096])
def test_a_chunk_in_parts_is_the_whole(
    dtype: torch.dtype, shape: tuple[int, int, int], kind: torch.dtype | None, longest: int, window: int
) -> None:
    """64 tokens of a long prompt beside a short one; the same bits again and again, and in a graph that gets
    another list.
    """
    heads, kv_heads, head_dim = shape
    keys, queries = [longest, 12], [64, 12]
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": 64}
    case = paged_case(keys, **sizes, dtype=torch.float32 if kind else dtype, device="cuda")
    scales = None
    if kind is not None:
        case = narrow_case(case, kind)
        scales = case.scales
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device="cuda")
    most = most_parts(heads, 128, 64)
    in_parts, whole = listed(keys, 64, most), listed(keys, 64, 0)
    arrivals = torch.zeros(most * heads, dtype=torch.int32, device="cuda")
    place = (case.key_cache, case.value_cache, case.block_tables, starts(queries, "cuda"), case.seq_lens)

    def run(tile_list: torch.Tensor, parts: int) -> torch.Tensor:
        return prefill_attention(
            *(q, *place, 64, head_dim**-0.5, window),
            tiles={"BLOCK_M": 64}, scales=scales, tile_list=tile_list, parts=parts, arrivals=arrivals,
        )  # fmt: skip

    assert int(in_parts[0, 3]) > 2
    unsplit, split = run(whole, 0), run(in_parts, most)
    assert_near(split, unsplit.double(), loosen=2)
    positions = torch.tensor([longest - 64, longest - 1], device="cuda")
    rows = torch.tensor([0, 63], device="cuda")
    right = attention64(q[rows], case.keys[0], case.values[0], positions, head_dim**-0.5, window)
    assert_near(split[rows], right)
    assert all(torch.equal(run(in_parts, most), split) for _ in range(20))
    static, graph = in_parts.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static, most)
    for again in (in_parts, whole[: len(static)], in_parts):
        static[:] = static[-1].clone()  # nothing
        static[: len(again)] = again
        captured.fill_(math.nan)
        graph.replay()
        expected = split if again is in_parts else run(whole, 0)
        assert_near(captured, expected.double(), loosen=2)
        assert again is not in_parts or torch.equal(captured, split)
    assert not arrivals.any()


def test_most_parts_fill_a_gpu_twice() -> None:
    assert most_parts(32, 64, 64) == most_parts(32, 128, 64) == 8
    assert most_parts(32, 448, 64) == 8
    assert most_parts(32, 512, 64) == 0, "whole tiles are as many"
    assert most_parts(8, 64, 64) == most_parts(8, 896, 64) == 33
    assert most_parts(8, 1024, 64) == 0, "a long chunk has tiles of its own"
    assert most_parts(300, 16, 16) == 0


def test_parts_follow_the_keys() -> None:
    assert parts_of([32000], 8) == [8]
    assert parts_of([2 * LEAST_PART + 1], 8) == [2]
    assert parts_of([LEAST_PART - 1, 1], 8) == [1, 1]
    assert parts_of([32000, 12], 8) == [7, 1]
    assert parts_of([32064, 32000], 8) == [4, 4]
    assert parts_of([32000, 9000, 500], 8) == [5, 2, 1]
    assert parts_of([32000] * 9, 8) == [1] * 9
    assert parts_of([32000, 16], 0) == [1, 1]
    assert parts_of([], 8) == []


@pytest.mark.parametrize("most", [2, 7, 8, 33])
def test_tiles_in_parts_come_first_and_are_no_more_than_there_is_room_for(most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    for count in (1, 2, 3, 5, 30):
        for _ in range(20):
            keys = torch.randint(1, 40000, (count,), generator=generator).tolist()
            parts = parts_of(sorted(keys, reverse=True), most)
            assert parts == sorted(parts, reverse=True)
            assert sum(parts) <= max(most, count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 3, "tile_list": torch.zeros(2, 4, dtype=torch.int32)}, "parts is out of range"),
        ({"arrivals": torch.zeros(3, dtype=torch.int32)}, "arrivals is out of range"),
        ({"arrivals": torch.zeros(4)}, "arrivals has the wrong dtype"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    case = paged_case([5], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    place = (case.key_cache, case.value_cache, case.block_tables, starts([1], "cpu"), case.seq_lens)
    if "arrivals" in options:
        options |= {"parts": 2, "tile_list": torch.zeros(2, 4, dtype=torch.int32)}
    with pytest.raises(IngotError, match=message):
        prefill_attention(torch.zeros(1, 2, 16), *place, 1, 1.0, **options)
