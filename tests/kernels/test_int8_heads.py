"""Attention that ends in 8 bits gives the numbers of its own output, quantized by heads: every one."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows
from tests.kernels.flat_calls import (
    paged_attention,
    paged_attention_triton,
    prefill_attention,
    prefill_attention_triton,
)
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal
from tests.kernels.paged_case import paged_case

LENGTHS = [5, 0, 150, 64, 1]
HEADS = [(2, 2, 64), (1, 1, 48), (4, 2, 64), (7, 1, 80)]  # heads, kv_heads, head_dim
TILES = {"MERGE": 1}, {"AXIS": 2}
PAGED = [(*heads, {}) for heads in HEADS] + [(*heads, tiles) for heads in HEADS[2:] for tiles in TILES]


def receivers(q: torch.Tensor, static: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned out and scales, or the scale of all: a third of what normal values reach."""
    out = torch.full(q.shape, 99, dtype=torch.int8, device=q.device)
    if static:
        return out, torch.tensor([1.0 / 127], device=q.device)
    return out, torch.full(q.shape[:2], float("nan"), device=q.device)


def assert_heads(found: Int8Rows, attended: torch.Tensor, static: torch.Tensor | None) -> None:
    expected = quantize_rows(attended.flatten(1), 0 if static is not None else attended.shape[2], static)
    assert found.group == expected.group
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "merge"), PAGED)
@pytest.mark.parametrize("longest", [150, 2000])
def test_paged_attention(
    impl: Implementation,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    merge: dict[str, int],
    longest: int,
) -> None:
    """One split and several, merged by the last program or by a launch."""
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=32, dtype=dtype, device=impl.device
    )
    q = normal(len(LENGTHS), heads, head_dim, dtype=dtype, device=impl.device)
    arguments = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, longest)
    tiles = {"MIN_SPLIT": 64 if longest == 150 else 512, **merge}
    op = impl(paged_attention, paged_attention_triton)
    attended = op(*arguments, tiles=tiles)
    for static in (False, True):
        out, scales = receivers(q, static)
        assert op(*arguments, tiles=tiles, out=out, out_scales=scales) is out
        assert_heads(int8_heads(out, scales), attended, scales if static else None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_the_scales_of_many_requests(head_dim: int, dtype: torch.dtype) -> None:
    """A warp's lanes agree on each output, so that a scale from one lane is that of another's values."""
    lengths = [index % 40 + 1 for index in range(128)]
    case = paged_case(lengths, kv_heads=4, head_dim=head_dim, block_size=16, dtype=dtype, device="cuda")
    q = normal(len(lengths), 4, head_dim, dtype=dtype, device="cuda")
    arguments = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, 64)
    attended = paged_attention(*arguments)
    out, scales = receivers(q, static=False)
    paged_attention(*arguments, out=out, out_scales=scales)
    assert_heads(int8_heads(out, scales), attended, None)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_prefill_attention(
    impl: Implementation, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Two requests of three; the rows of the other stay as they are."""
    lengths, queries = [3, 70, 40], [2, 33, 40]
    case = paged_case(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype, device=impl.device
    )
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)
    bounds = torch.tensor([2, 35, 75], dtype=torch.int32, device=impl.device)
    tables, lens = case.block_tables[1:], case.seq_lens[1:]
    arguments = (q, case.key_cache, case.value_cache, tables, bounds, lens, max(queries), 0.1)
    op = impl(prefill_attention, prefill_attention_triton)
    attended = op(*arguments)[2:]
    for static in (False, True):
        out, scales = receivers(q, static)
        assert op(*arguments, out=out, out_scales=scales) is out
        assert (out[:2] == 99).all()
        assert static or scales[:2].isnan().all()
        rows = int8_heads(out[2:], scales if static else scales[2:])
        assert_heads(rows, attended, scales if static else None)


def test_refused() -> None:
    case = paged_case([5], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    q = normal(1, 2, 16, dtype=torch.float32)
    arguments = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, 5)
    with pytest.raises(IngotError, match="out_scales needs an int8 out"):
        paged_attention(*arguments, out_scales=torch.ones(1))
    with pytest.raises(IngotError, match="out has the wrong dtype"):
        paged_attention(*arguments, out=torch.zeros_like(q), out_scales=torch.ones(1))
    with pytest.raises(IngotError, match="out_scales has the wrong shape"):
        paged_attention(*arguments, out=torch.zeros_like(q).to(torch.int8), out_scales=torch.ones(1, 3))
    with pytest.raises(IngotError, match="static has the wrong shape"):
        paged_attention(*arguments, out=torch.zeros_like(q).to(torch.int8), out_scales=torch.ones(2))
