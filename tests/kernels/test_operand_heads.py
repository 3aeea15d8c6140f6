"""Attention whose output ends in the operand's order gives its own output, each row's columns moved."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.rows.row_endings import OperandOrder
from tests.kernels.flat_calls import (
    paged_attention,
    paged_attention_triton,
    prefill_attention,
    prefill_attention_triton,
)
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal
from tests.kernels.paged_case import paged_case

LENGTHS = [5, 0, 150, 64, 1]
HEADS = [(2, 2, 64), (3, 1, 96), (4, 2, 128)]  # heads, kv_heads, head_dim
ORDER = OperandOrder()


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tiles", [{"MIN_SPLIT": 64}, {"MIN_SPLIT": 512}, {"MIN_SPLIT": 64, "MERGE": 1}])
def test_paged_attention(
    impl: Implementation, dtype: torch.dtype, heads: tuple[int, int, int], tiles: dict[str, int]
) -> None:
    """One split and several, merged by the last program or by a launch; into a new tensor or a given one."""
    num_heads, kv_heads, head_dim = heads
    if num_heads == kv_heads:
        tiles = {name: value for name, value in tiles.items() if name != "MERGE"}
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=32, dtype=dtype, device=impl.device
    )
    q = normal(len(LENGTHS), num_heads, head_dim, dtype=dtype, device=impl.device)
    arguments = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, 150)
    op = impl(paged_attention, paged_attention_triton)
    wanted = op(*arguments, tiles=tiles).flatten(1)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=q.device)
    assert op(*arguments, tiles=tiles, out=out, out_scales=ORDER) is out
    for found in (out, op(*arguments, tiles=tiles, out_scales=ORDER)):
        assert torch.equal(OperandRows(found.flatten(1)).natural(), wanted)
    assert not torch.equal(out.flatten(1), wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_attention(impl: Implementation, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, head_dim = heads
    lengths, queries = [40, 20], [17, 20]
    case = paged_case(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=torch.float16, device=impl.device
    )
    q = normal(sum(queries), num_heads, head_dim, dtype=torch.float16, device=impl.device)
    bounds = torch.tensor([0, 17, 37], dtype=torch.int32, device=impl.device)
    place = (q, case.key_cache, case.value_cache, case.block_tables, bounds, case.seq_lens, 20, 0.1)
    op = impl(prefill_attention, prefill_attention_triton)
    found = op(*place, out_scales=ORDER).flatten(1)
    assert torch.equal(OperandRows(found).natural(), op(*place).flatten(1))


def test_refused() -> None:
    case = paged_case([5], kv_heads=1, head_dim=48, block_size=16, dtype=torch.float32)
    q = normal(1, 2, 48, dtype=torch.float32)
    place = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, 5)
    with pytest.raises(IngotError, match="whole spans"):
        paged_attention(*place, out_scales=ORDER)
