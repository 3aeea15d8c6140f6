"""Batch-invariant attention against float64, and every token against itself computed by another step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from tests.kernels.flat_calls import invariant_attention, invariant_attention_triton
from tests.kernels.interpreter import order_products
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case

LENGTHS, QUERIES = [13, 0, 37, 1, 290], [13, 2, 5, 1, 3]
CASES = {
    # heads, kv_heads, head_dim, block_size, window
    "mha": (2, 2, 16, 16, 0),
    "gqa": (6, 2, 32, 64, 0),
    "window": (4, 1, 24, 8, 11),
}


def bounds(queries: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)


def attend(
    op: Any,
    q: torch.Tensor,
    case: PagedCase,
    lengths: list[int],
    queries: list[int],
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """The last ``queries`` tokens of each request, as if it had ``lengths`` tokens."""
    lens = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    place = (case.key_cache, case.value_cache, case.block_tables, bounds(queries, str(q.device)), lens)
    return op(q, *place, max(queries), 4096, scale, window)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decode", [False, True])
def test_against_float64(impl: Implementation, dtype: torch.dtype, name: str, decode: bool) -> None:
    heads, kv_heads, head_dim, block_size, window = CASES[name]
    queries = [1] * len(LENGTHS) if decode else QUERIES
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=impl.device
    )
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)
    op = impl(invariant_attention, invariant_attention_triton)
    out = attend(op, q, case, LENGTHS, queries, head_dim**-0.5, window)
    starts = bounds(queries, "cpu").tolist()
    for row, (length, count) in enumerate(zip(LENGTHS, queries, strict=True)):
        mine = slice(starts[row], starts[row + 1])
        positions = torch.arange(length - count, length, device=impl.device)
        if length == 0:
            assert (out[mine] == 0).all()
            continue
        expected = attention64(q[mine], case.keys[row], case.values[row], positions, head_dim**-0.5, window)
        assert_near(out[mine], expected)


def check_steps(op: Any, q: torch.Tensor, case: PagedCase, window: int, pieces: list[int]) -> None:
    """A request in one step, in pieces, and token by token at its end: the same bits."""
    length = q.shape[0]
    whole = attend(op, q, case, [length], [length], 0.2, window)
    for begin, end in itertools.pairwise([0, *itertools.accumulate(pieces)]):
        piece = attend(op, q[begin:end], case, [end], [end - begin], 0.2, window)
        assert torch.equal(piece, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [0, 21])
def test_the_step_changes_no_bit(impl: Implementation, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter given products that are the same in every tile; on a GPU with its own."""
    order_products(monkeypatch)
    case = paged_case([266], kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32, device=impl.device)
    q = normal(266, 2, 32, dtype=torch.float32, device=impl.device)
    op = impl(invariant_attention, invariant_attention_triton)
    check_steps(op, q, case, window, [7, 17, 233, 5, 1, 1, 1, 1])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_company_changes_no_bit(impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    order_products(monkeypatch)
    lengths, queries = [40, 300, 0, 66], [4, 1, 1, 20]
    case = paged_case(
        lengths, kv_heads=2, head_dim=16, block_size=32, dtype=torch.float16, device=impl.device
    )
    wide = normal(26, 5, 16, dtype=torch.float16, device=impl.device)
    q = wide[:, :4]  # strided
    op = impl(invariant_attention, invariant_attention_triton)
    together = attend(op, q, case, lengths, queries, 0.25)
    alone = paged_case([300], kv_heads=2, head_dim=16, block_size=32, dtype=torch.float16, device=impl.device)
    alone.key_cache, alone.value_cache = case.key_cache, case.value_cache
    alone.block_tables = case.block_tables[1:2]
    assert torch.equal(attend(op, q[4:5], alone, [300], [1], 0.25), together[4:5])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 8, 128), (14, 2, 64), (8, 1, 80), (2, 2, 256), (4, 4, 8)]
)
@pytest.mark.parametrize("window", [0, 300])
def test_chunks_and_decodes_on_a_gpu(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """A prompt of 1111 tokens, whole, in chunks of many sizes, and its last tokens one by one."""
    case = paged_case([1111], kv_heads=kv_heads, head_dim=head_dim, block_size=64, dtype=dtype, device="cuda")
    q = 3 * normal(1111, heads, head_dim, dtype=dtype, device="cuda")
    for pieces in (
        [16] * 40 + [471],
        [64] * 17 + [23],
        [500, 130, 3, 17, 100, 300, 60, 1],
        [1000] + [1] * 111,
    ):
        assert sum(pieces) == 1111
        check_steps(invariant_attention, q, case, window, pieces)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4)])
def test_7b_on_a_gpu(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    lengths = [4096, 300, 0, 777, 512]
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=128, block_size=64, dtype=dtype, device="cuda")
    for queries in ([1] * 5, [600, 300, 1, 2, 1]):
        q = normal(sum(queries), heads, 128, dtype=dtype, device="cuda")
        out = attend(invariant_attention, q, case, lengths, queries, 128**-0.5)
        starts = bounds(queries, "cpu").tolist()
        for row, length in enumerate(lengths):
            mine = slice(starts[row], starts[row + 1])
            positions = torch.arange(length - queries[row], length, device="cuda")
            if length:
                expected = attention64(q[mine], case.keys[row], case.values[row], positions, 128**-0.5)
                assert_near(out[mine], expected)


def test_refused() -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 4, 16),
        "key_cache": torch.zeros(5, 2, 8, 16),
        "value_cache": torch.zeros(5, 2, 8, 16),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
        "max_query_len": 2,
        "max_seq_len": 9,
        "scale": 1.0,
    }
    invariant_attention(**arguments)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": torch.zeros(3, 4, 4)}, "head_dim is out of range"),
        ({"q": torch.zeros(3, 5, 16)}, "multiple of key-value heads"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "query_start has the wrong shape"),
        ({"seq_lens": torch.tensor(0, dtype=torch.int32)}, "seq_lens has the wrong shape"),
        ({"max_query_len": -1}, "max_query_len is out of range"),
        ({"max_seq_len": -1}, "max_seq_len is out of range"),
        ({"window": -1}, "window is out of range"),
    ]
    for change, message in changes:
        with pytest.raises(IngotError, match=message):
            invariant_attention(**arguments | change)
