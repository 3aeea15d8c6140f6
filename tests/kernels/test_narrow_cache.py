"""A KV cache in 8 bits: what is written is the rule's to the bit, what is read is what the numbers mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.attention.paged_attention import candidate_tiles
from ingot.kernels.cache.cache_scales import E4M3, NARROW_CACHES, CacheScales, quantize_heads
from tests.kernels import test_invariant_attention as invariant
from tests.kernels import test_paged_attention as decode
from tests.kernels import test_paged_stream as stream
from tests.kernels import test_prefill_attention as prefill
from tests.kernels import test_rope_kv_write as rope
from tests.kernels.flat_calls import (
    invariant_attention,
    invariant_attention_triton,
    paged_attention,
    paged_attention_triton,
    paged_stream_triton,
    prefill_attention,
    prefill_attention_triton,
    rope_kv_write,
    rope_kv_write_triton,
)
from tests.kernels.interpreter import order_products
from tests.kernels.narrow_cache_case import NarrowCase, narrow_case
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.paged_case import paged_case

HALF = torch.float16


KINDS = [pytest.param(dtype, id=name) for name, dtype in NARROW_CACHES.items()]
LARGEST = {torch.int8: 127, E4M3: 448}


def make_case(
    lengths: list[int], device: str, kind: torch.dtype, sizes: tuple[float, float] = (1.0, 1.0), **sized: int
) -> NarrowCase:
    return narrow_case(paged_case(lengths, dtype=torch.float32, device=device, **sized), kind, sizes)


def poisoned(like: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A cache in which every byte is 55."""
    return torch.full(like.shape, 55, dtype=torch.int8, device=like.device).view(kind)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", rope.CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_a_wide_cache_quantized(
    impl: Implementation, kind: torch.dtype, dtype: torch.dtype, case: str
) -> None:
    arguments, options = rope.make_arguments(case, dtype, impl.device)
    op = impl(rope_kv_write, rope_kv_write_triton)
    wide_q = op(*arguments, **options)
    keys, values = (poisoned(cache, kind) for cache in arguments[5:7])
    marks = [torch.full(keys.shape[:3], mark, device=impl.device) for mark in (7.0, 9.0)]
    scales = CacheScales(*marks)
    narrow_q = op(*arguments[:5], keys, values, *arguments[7:], **options, scales=scales)
    assert torch.equal(narrow_q, wide_q)
    slots = [slot for slot in rope.SLOTS if slot >= 0]
    for numbers, found, wide, mark in zip(
        (keys, values), scales.tensors, arguments[5:7], (7, 9), strict=True
    ):
        expected, expected_scales = quantize_heads(wide, kind)
        for slot in range(keys.shape[0] * 16):
            place = (slot // 16, slice(None), slot % 16)
            if slot in slots:
                assert torch.equal(numbers[place].float(), expected[place].float())
                assert torch.equal(found[place], expected_scales[place])
            else:
                assert (numbers[place].view(torch.int8) == 55).all()
                assert (found[place] == mark).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_zeros_and_one_of_large_numbers(impl: Implementation, kind: torch.dtype) -> None:
    arguments, options = rope.make_arguments("gpt2", HALF, impl.device)
    arguments[0][0], arguments[0][2] = 0, 60000
    keys, values = (poisoned(cache, kind) for cache in arguments[5:7])
    scales = CacheScales.zeros(*keys.shape[:3], keys.device)
    impl(rope_kv_write, rope_kv_write_triton)(
        *arguments[:5], keys, values, *arguments[7:], **options, scales=scales
    )
    zeros, large = rope.SLOTS[0], rope.SLOTS[2]
    for numbers, found in zip((keys, values), scales.tensors, strict=True):
        assert (numbers[zeros // 16, :, zeros % 16].float() == 0).all()
        assert (found[zeros // 16, :, zeros % 16] > 0).all()
        assert (numbers[large // 16, :, large % 16].float() == LARGEST[kind]).all()
        torch.testing.assert_close(
            found[large // 16, :, large % 16] * LARGEST[kind], torch.full((3,), 6e4, device=impl.device)
        )


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", decode.CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_attention(impl: Implementation, kind: torch.dtype, dtype: torch.dtype, name: str) -> None:
    heads, kv_heads, head_dim, block_size, window = decode.CASES[name]
    lengths = decode.LENGTHS
    case = make_case(lengths, impl.device, kind, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    q = normal(len(lengths), heads, head_dim, dtype=dtype, device=impl.device)
    op = impl(paged_attention, paged_attention_triton)
    place = decode.paged_arguments(case)
    out = op(q, *place, head_dim**-0.5, max(lengths), window, scales=case.scales)
    assert_near(out, decode.expected64(q, case, head_dim**-0.5, window))
    assert (out[1] == 0).all(), "a padding row is zeros"


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_of_decode_attention(
    impl: Implementation, kind: torch.dtype, heads: int, batch: int
) -> None:
    case = make_case([300, 129], impl.device, kind, kv_heads=2, head_dim=64, block_size=64)
    q = normal(2, heads, 64, dtype=HALF, device=impl.device)
    op = impl(paged_attention, paged_attention_triton)
    for tiles in candidate_tiles(2, heads // 2, 64, 1, q.device, batch):
        out = op(q, *decode.paged_arguments(case), 0.2, 300, tiles=tiles, scales=case.scales)
        assert_near(out, decode.expected64(q, case, 0.2, 0))


@pytest.mark.grid(1)
@pytest.mark.parametrize("device", stream.DEVICES)
@pytest.mark.parametrize("name", ["group of 2", "group of 7", "group of 8, window", "wide head"])
@pytest.mark.parametrize("variant", stream.VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_shared_keys(device: str, kind: torch.dtype, name: str, variant: str) -> None:
    heads, kv_heads, head_dim, block_size, window = stream.CASES[name]
    case = make_case(
        stream.LENGTHS, device, kind, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    dtype = DTYPES[list(stream.VARIANTS).index(variant) % 3]
    q = normal(len(stream.LENGTHS), heads, head_dim, dtype=dtype, device=device)
    tiles, programs = stream.VARIANTS[variant]
    place, scale = stream.where(case), head_dim**-0.5
    out = paged_stream_triton(q, *place, scale, 870, window, tiles, programs=programs, scales=case.scales)
    assert_near(out, stream.expected64(q, case, scale, window))
    assert (out[1] == 0).all(), "a padding row is zeros"


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", prefill.CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_attention(impl: Implementation, kind: torch.dtype, dtype: torch.dtype, name: str) -> None:
    heads, kv_heads, head_dim, block_size, window = prefill.CASES[name]
    case = make_case(
        prefill.LENGTHS, impl.device, kind, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    queries = prefill.QUERIES
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)
    place = (case.key_cache, case.value_cache, case.block_tables, prefill.starts(queries, impl.device))
    op = impl(prefill_attention, prefill_attention_triton)
    out = op(q, *place, case.seq_lens, max(queries), head_dim**-0.5, window, scales=case.scales)
    assert_near(out, prefill.expected64(q, case, queries, head_dim**-0.5, window))
    assert (out[19:21] == 0).all(), "a padding row is zeros"


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("kind", KINDS)
def test_small_and_large_values_keep_their_relative_accuracy(
    impl: Implementation, kind: torch.dtype, heads: int, size: float
) -> None:
    """Scales of values that 16 bits could not hold together with a weight."""
    case = make_case([200], impl.device, kind, (1.0, size), kv_heads=1, head_dim=32, block_size=64)
    q = normal(200, heads, 32, dtype=HALF, device=impl.device)
    place, scales = (case.key_cache, case.value_cache, case.block_tables), case.scales
    out = impl(paged_attention, paged_attention_triton)(
        q[-1:], *place, case.seq_lens, 0.2, 200, scales=scales
    )
    expected = decode.expected64(q[-1:], case, 0.2, 0)
    assert_near((out.float() / size).half(), expected / size)
    starts = prefill.starts([200], impl.device)
    op = impl(prefill_attention, prefill_attention_triton)
    out = op(q, *place, starts, case.seq_lens, 200, 0.2, scales=scales)
    assert_near((out.float() / size).half(), prefill.expected64(q, case, [200], 0.2, 0) / size)


def invariantly(impl: Implementation, case: NarrowCase) -> Callable[..., torch.Tensor]:
    op = impl(invariant_attention, invariant_attention_triton)
    return lambda *arguments: op(*arguments, scales=case.scales)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", invariant.CASES)
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_invariant_attention(
    impl: Implementation, kind: torch.dtype, dtype: torch.dtype, name: str, one: bool
) -> None:
    heads, kv_heads, head_dim, block_size, window = invariant.CASES[name]
    lengths = invariant.LENGTHS
    queries = [1] * len(lengths) if one else invariant.QUERIES
    case = make_case(lengths, impl.device, kind, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)
    scale = head_dim**-0.5
    out = invariant.attend(invariantly(impl, case), q, case, lengths, queries, scale, window)
    expected = prefill.expected64(q, case, queries, scale, window)
    assert_near(out, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_changes_no_bit(
    impl: Implementation, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_products(monkeypatch)
    case = make_case([266], impl.device, kind, kv_heads=1, head_dim=32, block_size=16)
    q = normal(266, 2, 32, dtype=torch.float32, device=impl.device)
    invariant.check_steps(invariantly(impl, case), q, case, 0, [7, 17, 233, 5, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, "key_cache has the wrong dtype"),
        ({"key_cache": torch.zeros(2, 1, 16, 8)}, "key_cache has the wrong dtype"),
        (
            {"scales": CacheScales(torch.zeros(2, 1, 8), torch.zeros(2, 1, 16))},
            "key scales has the wrong shape",
        ),
        ({"scales": CacheScales(*torch.zeros(2, 2, 1, 16).half())}, "key scales has the wrong dtype"),
        ({"strided": True}, "key_cache is not contiguous"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    caches = torch.zeros(2, 2, 1, 16, 8, dtype=torch.int8)
    given: dict[str, Any] = {"scales": CacheScales.zeros(2, 1, 16, torch.device("cpu"))} | changes
    if given.pop("strided", False):
        caches = torch.zeros(2, 2, 2, 16, 8, dtype=torch.int8)[:, :, :1]
    key_cache, value_cache = given.pop("key_cache", caches[0]), caches[1]
    tables, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(IngotError, match=message):
        paged_attention(torch.zeros(1, 1, 8), key_cache, value_cache, tables, lens, 1.0, 16, **given)
