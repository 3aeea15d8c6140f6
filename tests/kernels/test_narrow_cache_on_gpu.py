"""What only a GPU shows of a KV cache in 8 bits: 7B shapes, capture and replay, the same bits twice."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.attention.paged_attention import candidate_tiles
from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales, quantize_heads
from tests.kernels.flat_calls import paged_attention, prefill_attention, rope_kv_write
from tests.kernels.narrow_cache_case import NarrowCase, narrow_case
from tests.kernels.numerics import assert_near, normal
from tests.kernels.paged_case import attention64, paged_case

pytestmark = pytest.mark.gpu

KINDS = [pytest.param(dtype, id=name) for name, dtype in NARROW_CACHES.items()]
HALF_DTYPES = [torch.float16, torch.bfloat16]
HEADS = [(32, 32), (32, 8), (28, 4)]
SCALE = 128**-0.5


def make_case(lengths: list[int], kv_heads: int, kind: torch.dtype) -> NarrowCase:
    sizes = {"kv_heads": kv_heads, "head_dim": 128, "block_size": 64}
    return narrow_case(paged_case(lengths, dtype=torch.float32, device="cuda", **sizes), kind)


def expected(q: torch.Tensor, case: NarrowCase) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, keys in enumerate(case.keys):
        if len(keys):
            last = torch.tensor([len(keys) - 1], device=q.device)
            out[row] = attention64(q[row : row + 1], keys, case.values[row], last, SCALE)[0]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("batch", "longest"), [(1, 640), (2, 3000), (8, 640), (64, 576), (256, 300)])
def test_decode_attention_of_7b_shapes(
    kind: torch.dtype, dtype: torch.dtype, heads: tuple[int, int], batch: int, longest: int
) -> None:
    lengths = [max(longest - 61 * index % longest, 1) for index in range(batch)]
    if batch > 2:
        lengths[2] = 0
    case = make_case(lengths, heads[1], kind)
    q = normal(batch, heads[0], 128, dtype=dtype, device="cuda")
    place = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens, SCALE, longest)
    right = expected(q, case)
    torch.cuda.synchronize()  # the caches are there before a kernel that reads them early starts
    once = paged_attention(q, *place, scales=case.scales)
    assert_near(once, right)
    assert torch.equal(paged_attention(q, *place, scales=case.scales), once)
    for tiles in candidate_tiles(heads[1], heads[0] // heads[1], 128, 1, q.device, batch):
        assert_near(paged_attention(q, *place, tiles=tiles, scales=case.scales), right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [16, 200, 2048])
def test_prefill_attention_of_7b_shapes(
    kind: torch.dtype, dtype: torch.dtype, heads: tuple[int, int], length: int
) -> None:
    case = make_case([length], heads[1], kind)
    q = normal(length, heads[0], 128, dtype=dtype, device="cuda")
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    place = (case.key_cache, case.value_cache, case.block_tables, starts, case.seq_lens, length, SCALE)
    out = prefill_attention(q, *place, scales=case.scales)
    rows = torch.tensor([0, length // 2, length - 1], device="cuda")
    assert_near(out[rows], attention64(q[rows], case.keys[0], case.values[0], rows, SCALE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_written_read_and_replayed_in_a_graph(
    kind: torch.dtype, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    """A write right before an attention that reads older keys early, as in a decode step."""
    batch, context = 16, 300
    case = make_case([context] * batch, heads[1], kind)
    q_size, kv_size = heads[0] * 128, heads[1] * 128
    qkv = normal(batch, q_size + 2 * kv_size, dtype=dtype, device="cuda")
    last = torch.full((batch,), context - 1, device="cuda")
    slots = case.block_tables[:, (context - 1) // 64].long() * 64 + (context - 1) % 64
    caches, sizes = (case.key_cache, case.value_cache), (*heads, 128)

    def step() -> torch.Tensor:
        q = rope_kv_write(
            qkv, None, last, last, slots, *caches, *sizes, tiles={"OVERLAP": 2}, scales=case.scales
        )
        return paged_attention(q, *caches, case.block_tables, case.seq_lens, SCALE, 4096, scales=case.scales)

    eager = step()
    numbers, scales = quantize_heads(qkv.unflatten(1, (-1, 128))[:, heads[0] : heads[0] + heads[1]], kind)
    assert torch.equal(case.key_cache[slots // 64, :, slots % 64].float(), numbers.float())
    assert torch.equal(case.scales.keys[slots // 64, :, slots % 64], scales)
    for row in range(batch):
        parts = qkv[row].unflatten(0, (-1, 128))
        for dense, at in ((case.keys, heads[0]), (case.values, heads[0] + heads[1])):
            own = quantize_heads(parts[at : at + heads[1]], kind)
            dense[row][-1] = own[0].double() * own[1].double()[:, None]
    assert_near(eager, expected(qkv[:, :q_size].unflatten(1, (-1, 128)), case))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)


def test_scales_of_another_device_are_refused() -> None:
    case = make_case([5], 1, torch.int8)
    q = normal(1, 1, 128, dtype=torch.float16, device="cuda")
    place = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens, SCALE, 64)
    scales = CacheScales(*(tensor.cpu() for tensor in case.scales.tensors))
    with pytest.raises(ValueError, match="another device"):
        paged_attention(q, *place, scales=scales)
