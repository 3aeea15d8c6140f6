"""Softcaps of scores in every attention kernel, and of logits, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.softcap import softcap
from tests.kernels.flat_calls import (
    invariant_attention,
    invariant_attention_triton,
    paged_attention,
    paged_attention_triton,
    prefill_attention,
    prefill_attention_triton,
)
from tests.kernels.narrow_cache_case import narrow_case
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case

CAP = 1.5  # scores are of order one, and reach four
LENGTHS, QUERIES = [13, 0, 37, 1, 290], [13, 2, 5, 1, 3]
CASES = {
    # heads, kv_heads, head_dim, block_size, window
    "mha": (2, 2, 64, 16, 0),
    "gqa": (6, 2, 32, 64, 0),
    "window": (4, 1, 24, 8, 11),
    "mha, window": (2, 2, 48, 16, 100),
}


def made(
    name: str, dtype: torch.dtype, impl: Implementation, queries: list[int]
) -> tuple[PagedCase, torch.Tensor]:
    heads, kv_heads, head_dim, block_size, _ = CASES[name]
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = paged_case(LENGTHS, **sizes, dtype=dtype, device=impl.device)
    return case, normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)


def bounds(queries: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)


def check(out: torch.Tensor, q: torch.Tensor, case: PagedCase, queries: list[int], window: int) -> None:
    """Against float64, which the cap moves by far more than rounding does."""
    starts = bounds(queries, "cpu").tolist()
    scale = q.shape[2] ** -0.5
    for row, (length, count) in enumerate(zip(LENGTHS, queries, strict=True)):
        mine = slice(starts[row], starts[row + 1])
        if length == 0:
            assert (out[mine] == 0).all()
            continue
        place = (q[mine], case.keys[row], case.values[row])
        positions = torch.arange(length - count, length, device=q.device)
        expected = attention64(*place, positions, scale, window, CAP)
        assert_near(out[mine], expected)
        if length > 30:
            assert float((attention64(*place, positions, scale, window) - expected).abs().max()) > 0.02


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_decodes(impl: Implementation, dtype: torch.dtype, name: str) -> None:
    queries = [1] * len(LENGTHS)
    case, q = made(name, dtype, impl, queries)
    place = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    op = impl(paged_attention, paged_attention_triton)
    window = CASES[name][4]
    check(op(q, *place, q.shape[2] ** -0.5, max(LENGTHS), window, softcap=CAP), q, case, queries, window)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_prompts(impl: Implementation, dtype: torch.dtype, name: str) -> None:
    case, q = made(name, dtype, impl, QUERIES)
    place = (case.key_cache, case.value_cache, case.block_tables, bounds(QUERIES, impl.device), case.seq_lens)
    op = impl(prefill_attention, prefill_attention_triton)
    scale, window = q.shape[2] ** -0.5, CASES[name][4]
    check(op(q, *place, max(QUERIES), scale, window, softcap=CAP), q, case, QUERIES, window)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decode", [False, True])
def test_whatever_the_step(impl: Implementation, dtype: torch.dtype, name: str, decode: bool) -> None:
    queries = [1] * len(LENGTHS) if decode else QUERIES
    case, q = made(name, dtype, impl, queries)
    place = (case.key_cache, case.value_cache, case.block_tables, bounds(queries, impl.device), case.seq_lens)
    op = impl(invariant_attention, invariant_attention_triton)
    sizes = (max(queries), 4096, q.shape[2] ** -0.5, CASES[name][4])
    check(op(q, *place, *sizes, softcap=CAP), q, case, queries, sizes[3])


@pytest.mark.grid(1)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["mha", "gqa"])
def test_over_a_cache_in_8_bits(impl: Implementation, dtype: torch.dtype, name: str) -> None:
    queries = [1] * len(LENGTHS)
    wide, q = made(name, torch.float32, impl, queries)
    case, q = narrow_case(wide, torch.int8, (60.0, 20.0)), q.to(dtype)
    place = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    op = impl(paged_attention, paged_attention_triton)
    options = {"scales": case.scales, "softcap": CAP}
    check(op(q, *place, q.shape[2] ** -0.5, max(LENGTHS), **options), q, case, queries, 0)
    starts, op = bounds(queries, impl.device), impl(prefill_attention, prefill_attention_triton)
    out = op(q, *place[:3], starts, case.seq_lens, 1, q.shape[2] ** -0.5, **options)
    check(out, q, case, queries, 0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(impl: Implementation, dtype: torch.dtype) -> None:
    x = 40 * normal(3, 1500, dtype=dtype, device=impl.device)
    expected = 30 * torch.tanh(x.double() / 30)
    found = impl(softcap)(x, 30.0)
    assert found.data_ptr() == x.data_ptr(), "written over"
    assert_near(found / 30, expected / 30)


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan")])
def test_refused(cap: float) -> None:
    with pytest.raises(IngotError, match="cap is not positive"):
        softcap(torch.zeros(2, 3), -abs(cap))
    cache, table = torch.zeros(2, 1, 8, 16), torch.zeros(1, 2, dtype=torch.int32)
    length: Any = torch.ones(1, dtype=torch.int32)
    with pytest.raises(IngotError, match="softcap is out of range"):
        paged_attention(torch.zeros(1, 1, 16), cache, cache, table, length, 1.0, 8, softcap=cap)
