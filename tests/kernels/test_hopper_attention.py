"""Prompt attention of Hopper's warp groups: on a GPU against float64, on any machine when it is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ingot.kernels.attention import hopper_attention as hopper
from ingot.kernels.attention import prefill_attention as launcher
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.attention.prefill_reference import NO_TILE
from ingot.kernels.cache.cache_scales import CacheScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.tiles import prefill_tiles
from ingot.kernels.tiles.prefill_tiles import HOPPER_TILES, LONG_CHUNK, candidate_tiles, default_tiles
from ingot.layers.forward_batch import LayerCache
from tests.kernels.compile_cases import empty
from tests.kernels.compile_hopper_cases import attention as hopper_case
from tests.kernels.flat_calls import prefill_attention, prefill_attention_triton
from tests.kernels.narrow_cache_case import narrow_case
from tests.kernels.numerics import assert_near, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case
from tests.kernels.test_int8_heads import assert_heads, receivers
from tests.kernels.test_prefill_attention import starts
from tests.unit.test_mixed_step import small_attention

HALF, BRAIN, CPU = torch.float16, torch.bfloat16, torch.device("cpu")
LENGTHS = [300, 1000, 129, 0, 700, 64, 257]
# A prompt, chunks on cached keys, a decode, padding, tiles that end in the middle, and at the end of a tile.
QUERIES = [300, 200, 1, 3, 513, 64, 130]
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha, large blocks": {"heads": 2, "block_size": 256},
    "mqa, small blocks": {"kv_heads": 1, "block_size": 16},
    "window": {"window": 37},
    "wide window": {"window": 300, "block_size": 128},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 5.0, "window": 200},
    "narrow heads": {"head_dim": 64},
    "narrow heads, window": {"head_dim": 64, "block_size": 32, "window": 100},
}
KINDS = {"16 bits": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def made(
    dtype: torch.dtype,
    kind: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 64,
    **_: Any,
) -> tuple[PagedCase, torch.Tensor]:
    """Every key that no request owns is no number."""
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = paged_case(LENGTHS, **sizes, dtype=torch.float32 if kind else dtype, device="cuda")
    q = normal(sum(QUERIES), heads, head_dim, dtype=dtype, device="cuda")
    return (case if kind is None else narrow_case(case, kind)), q


def attend(case: PagedCase, q: torch.Tensor, window: int = 0, softcap: float = 0.0, **options: Any) -> Any:
    begins = options.pop("begins", None)
    begins = starts(QUERIES, "cuda") if begins is None else begins
    place = (case.key_cache, case.value_cache, case.block_tables, begins, case.seq_lens)
    options = {"softcap": softcap, "scales": getattr(case, "scales", None), **options}
    options.setdefault("out", torch.full_like(q, math.nan))
    return prefill_attention(q, *place, max(QUERIES), q.shape[2] ** -0.5, window, **options)


def check(out: torch.Tensor, q: torch.Tensor, case: PagedCase, window: int = 0, softcap: float = 0.0) -> None:
    begin = 0
    for row, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        mine = slice(begin, begin + count)
        begin += count
        if length == 0:
            assert (out[mine] == 0).all(), "a padding row is zeros"
            continue
        positions = torch.arange(length - count, length, device=q.device)
        place = (q[mine], case.keys[row], case.values[row], positions)
        assert_near(out[mine], attention64(*place, q.shape[2] ** -0.5, window, softcap))


@pytest.fixture
def hopper_gpu() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    """What only such a GPU shows."""

    @pytest.mark.parametrize("dtype", [HALF, BRAIN])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", CASES)
    def test_against_float64(self, name: str, kind: str, dtype: torch.dtype) -> None:
        sizes = CASES[name]
        options = {key: sizes[key] for key in ("window", "softcap") if key in sizes}
        case, q = made(dtype, KINDS[kind], **sizes)
        out = attend(case, q, **options)
        check(out, q, case, **options)
        assert torch.equal(attend(case, q, **options), out)

    def test_many_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lengths = [50 + 37 * row % 400 for row in range(70)]
        monkeypatch.setattr(f"{__name__}.LENGTHS", lengths)
        monkeypatch.setattr(f"{__name__}.QUERIES", [7, *lengths[1:]])
        case, q = made(BRAIN)
        check(attend(case, q), q, case)

    def test_it_is_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case, q = made(BRAIN)
        calls: list[Any] = []
        monkeypatch.setattr(launcher, "hopper_attention", lambda *given: calls.append(given))
        attend(case, q)
        assert len(calls) == 1
        attend(case, q, tiles={"BLOCK_M": 64})
        assert len(calls) == 1

    def test_counts_are_left_at_zero(self) -> None:
        case, q = made(BRAIN)
        counts = torch.zeros(5, dtype=torch.int32, device="cuda")
        first = attend(case, q, arrivals=counts)
        assert not counts.any()
        assert torch.equal(attend(case, q, arrivals=counts), first)

    def test_a_list_of_tiles(self) -> None:
        case, q = made(BRAIN)
        whole = attend(case, q)
        tiles = [(row, at) for row, count in enumerate(QUERIES) for at in range(-(-count // 128))]
        tiles = [*tiles[1::2], (0, NO_TILE), *tiles[::2], (4, NO_TILE)]
        listed = torch.tensor([(*tile, 0, 1) for tile in tiles], dtype=torch.int32, device="cuda")
        assert torch.equal(attend(case, q, tile_list=listed, tiles={"BLOCK_M": 128}), whole)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_request_alone_has_the_same_bits(self, kind: str) -> None:
        case, q = made(HALF, KINDS[kind])
        together, begin = attend(case, q), 0
        for row, count in enumerate(QUERIES):
            mine, begin = slice(begin, begin + count), begin + count
            own = slice(row, row + 1)
            place = (case.key_cache, case.value_cache, case.block_tables[own], starts([count], "cuda"))
            alone = prefill_attention(
                *(q[mine], *place, case.seq_lens[own], 513, q.shape[2] ** -0.5),
                scales=getattr(case, "scales", None),
            )
            assert torch.equal(alone, together[mine])

    def test_chunks_are_the_whole(self) -> None:
        sizes = {"kv_heads": 2, "head_dim": 128, "block_size": 64}
        case = paged_case([900], **sizes, dtype=HALF, device="cuda")
        q = normal(900, 4, 128, dtype=HALF, device="cuda")

        def run(begin: int, end: int) -> torch.Tensor:
            lens = torch.tensor([end], dtype=torch.int32, device="cuda")
            place = (case.key_cache, case.value_cache, case.block_tables, starts([end - begin], "cuda"), lens)
            return prefill_attention(q[begin:end], *place, end - begin, 0.1)

        whole = run(0, 900)
        assert torch.equal(torch.cat([run(0, 256), run(256, 640), run(640, 900)]), whole)
        assert_near(torch.cat([run(0, 300), run(300, 441), run(441, 900)]), whole.double())

    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("kind", ["16 bits", "int8"])
    def test_outputs_in_8_bits(self, kind: str, static: bool) -> None:
        case, q = made(HALF, KINDS[kind])
        attended, (out, scales) = attend(case, q), receivers(q, static)
        attend(case, q, out=out, out_scales=scales)
        assert_heads(int8_heads(out, scales), attended, scales if static else None)

    def test_replayed_in_a_graph(self) -> None:
        case, q = made(BRAIN)
        eager, out = attend(case, q), torch.full_like(q, math.nan)
        begins, graph = starts(QUERIES, "cuda"), torch.cuda.CUDAGraph()  # no copy from the host in a graph
        with torch.cuda.graph(graph):
            attend(case, q, out=out, begins=begins)
        for _ in range(3):
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, eager)


def cache_of(kv_heads: int = 2, block_size: int = 64, head_dim: int = 128, dtype: Any = HALF) -> PagedCache:
    return PagedCache(*(empty(10, kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)))


@pytest.fixture
def any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors are on a Hopper GPU."""
    fits: Callable[..., bool] = prefill_tiles.fits_hopper
    monkeypatch.setattr(hopper, "on_hopper", lambda device, *sizes: fits(*sizes))


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(
    ("q", "cache", "served"),
    [
        (empty(300, 4, 128), cache_of(), True),
        (empty(300, 4, 64), cache_of(head_dim=64, block_size=16), True),
        (empty(300, 4, 128, dtype=torch.float32), cache_of(dtype=torch.float32), False),
        (empty(300, 4, 96), cache_of(head_dim=96), False),
        (empty(300, 4, 128), cache_of(block_size=8), False),
        (empty(300, 4, 128), cache_of(block_size=48), False),
        (empty(0, 4, 128), cache_of(), False),
        (empty(300, 4 * 128 + 4).unfold(1, 512, 512)[:, 0].unflatten(1, (4, 128)), cache_of(), False),
        (empty(300, 4, 128), PagedCache(*(empty(2, 10, 64, 128).transpose(0, 1) for _ in "kv")), False),
    ],
)
def test_what_is_served(q: torch.Tensor, cache: PagedCache, served: bool) -> None:
    assert hopper.serves(q, cache, 3) is served


@pytest.mark.usefixtures("any_gpu")
def test_so_many_requests_are_served() -> None:
    assert hopper.serves(empty(300, 4, 128), cache_of(), 128)
    assert not hopper.serves(empty(300, 4, 128), cache_of(), 129)


def test_no_other_device_is_served() -> None:
    assert not hopper.serves(torch.zeros(300, 4, 128).half(), cache_of(), 3)


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(
    ("longest", "tiles", "parts", "chosen"),
    [
        (2048, None, 0, True),
        (128, None, 0, True),
        (127, None, 0, False),
        (2048, {"BLOCK_M": 64}, 0, False),
        (2048, {"BLOCK_M": 128}, 0, True),
        (2048, {"BLOCK_M": 128, "BLOCK_N": 64}, 0, False),
        (2048, None, 8, False),
    ],
)
def test_when_it_is_chosen(
    longest: int, tiles: dict[str, int] | None, parts: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For long requests, unless tiles of another kernel are asked for, or tiles are in parts."""
    index, cache = empty(2, dtype=torch.int32), cache_of()
    listed = empty(40, 4, dtype=torch.int32) if parts else None
    place = (cache.keys, cache.values, empty(1, 9, dtype=torch.int32), index, index[:1], longest, 0.1)
    q, counts = empty(longest, 4, 128), empty(1 << 12, dtype=torch.int32)
    taken, other = MagicMock(), MagicMock()
    monkeypatch.setattr(launcher, "hopper_attention", taken)
    monkeypatch.setattr(launcher, "prefill_attention_kernel", other)
    prefill_attention_triton(q, *place, 0, tiles, tile_list=listed, parts=parts, arrivals=counts)
    assert (taken.called, other.__getitem__.called) == (chosen, not chosen)


@pytest.mark.usefixtures("any_gpu")
def test_blocks_are_copied_by_rows() -> None:
    """A descriptor's rows are the tokens of all blocks and heads; a box is a block, at most a key tile."""
    for block_size, rows in ((16, 16), (64, 64), (256, 128)):
        keys, _, scales, _ = hopper.cache_descriptors(cache_of(3, block_size))
        assert (keys.shape, keys.strides) == ([10 * 3 * block_size, 128], [128, 1])
        assert keys.block_shape == [rows, 64]
        assert scales is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [32, 256])
def test_descriptors_are_those_of_the_tensors(kind: str, block_size: int) -> None:
    """A descriptor that is kept says what one that is made of the tensor itself says."""
    narrow, rows, tokens = KINDS[kind] is not None, min(block_size, 128), 3 * 2 * block_size
    dtype = KINDS[kind] or HALF
    keys, values = (torch.zeros(3, 2, block_size, 128, dtype=dtype) for _ in range(2))
    scales = CacheScales(*(torch.zeros(3, 2, block_size) for _ in range(2))) if narrow else None
    found = hopper.cache_descriptors(PagedCache(keys, values, scales))
    layout = gl.NVMMASharedLayout(128, 8 if narrow else 16, 2)
    flat, box = gl.NVMMASharedLayout(0, 32, 2), [rows, 128 if narrow else 64]
    wanted: list[Any] = [TensorDescriptor(t, [tokens, 128], [128, 1], box, layout) for t in (keys, values)]
    if scales is not None:
        whole = ([tokens // rows, rows], [rows, 1], [1, rows], flat)
        wanted += [TensorDescriptor(t, *whole) for t in (scales.keys, scales.values)]
    for one, other in zip(found, [*wanted, None, None], strict=False):
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.base.data_ptr(), one.base.dtype) == (other.base.data_ptr(), other.base.dtype)
            for name in ("shape", "strides", "block_shape", "layout", "padding"):
                assert getattr(one, name) == getattr(other, name)


def test_descriptors_are_made_once() -> None:
    """Each layer's is made in the first step alone, by its place, dtype and sizes; it keeps no memory."""

    def cache(shape: tuple[int, ...] = (4, 2, 64, 128), dtype: torch.dtype = HALF) -> PagedCache:
        return PagedCache(*(torch.zeros(shape, dtype=dtype) for _ in range(2)))

    one, other = cache(), cache()
    keys, values, *_ = hopper.cache_descriptors(one)
    again = hopper.cache_descriptors(PagedCache(one.keys, one.values))
    assert again[0] is keys
    assert again[1] is values
    assert hopper.cache_descriptors(other)[0].base.data_ptr() == other.keys.data_ptr()
    seen = hopper.cache_descriptors(PagedCache(one.keys.view(BRAIN), one.values.view(BRAIN)))[0]
    assert (seen.base.dtype, keys.base.dtype) == (BRAIN, HALF)
    assert hopper.cache_descriptors(PagedCache(one.keys[:2], one.values[:2]))[0].shape == [2 * 2 * 64, 128]
    assert not isinstance(keys.base, torch.Tensor)


@pytest.mark.parametrize(("kind", "tokens"), [(None, 1 << 16), (torch.int8, 1 << 17)])
def test_constants_of_a_launch(
    kind: torch.dtype | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made once for launches that agree, and follow the cache's dtype and the window."""
    shapes: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: shapes.append(options["SHAPE"])

    monkeypatch.setattr(hopper, "hopper_attention_kernel", Kernel())
    monkeypatch.setattr(hopper, "multiprocessors", lambda _: 132)
    for window in (0, 0, 100):
        hopper_case(BRAIN, 32, 8, kind=kind, window=window)
    assert shapes[0] is shapes[1]
    assert (tokens, 4, 8) == (shapes[0].CACHED_TOKENS, shapes[0].GROUP, shapes[0].KV_HEADS)
    assert (shapes[0].HAS_WINDOW, shapes[2].HAS_WINDOW) == (False, True)
    assert (2 if kind is None else 1) == shapes[0].QUERY_STAGES, "8-bit tiles take the place"
    assert (gl.bfloat16, gl.bfloat16 if kind is None else gl.int8) == (shapes[0].DTYPE, shapes[0].CACHE_DTYPE)


def test_tiles_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step whose tiles are in parts keeps tiles of 64 queries."""
    attention, cache = small_attention("cpu", HALF, 0), LayerCache.zeros(2, 2, 64, 16, HALF, CPU)
    monkeypatch.setattr("ingot.layers.attention.on_hopper", lambda *_: True)
    assert attention.tile_rows(LONG_CHUNK, cache, HALF) == 128
    assert attention.tile_rows(LONG_CHUNK - 1, cache, HALF) == 64
    assert attention.tile_rows(16, cache, HALF) == 16


def test_tuning_compares_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_tiles, "on_hopper", lambda *_: True)
    assert candidate_tiles(2048, 128, 2) == [HOPPER_TILES, default_tiles(2048, 128, 2)]
    assert candidate_tiles(64, 128, 2)[0] == default_tiles(64, 128, 2)
