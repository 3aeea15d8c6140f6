"""Tokens that stay on the device between steps."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.sampling.feed_tokens import Sent, keep_tokens, take_tokens
from ingot.kernels.sampling.token_penalties import GENERATED
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [0, 1, 5, 256, 700])
def test_taken_where_a_row_is_named(impl: Implementation, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, 2**40, (count,), generator=generator)
    rows = torch.randint(-1, 9, (count,), generator=generator)
    table = torch.randint(0, 2**40, (9,), generator=generator)
    table[4] = -1
    expected = [
        i if r < 0 else max(int(table[r]), 0) for i, r in zip(ids.tolist(), rows.tolist(), strict=True)
    ]
    got = impl(take_tokens)(*(t.to(impl.device) for t in (ids, rows, table)))
    assert got.tolist() == expected


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_kept_and_the_rest_left_alone(impl: Implementation, dtype: torch.dtype, count: int) -> None:
    ids = torch.arange(7, 7 + count) * 3
    values = torch.linspace(-5, 5, count).to(dtype)
    values[::3] = float("nan")
    if count > 1:
        values[1] = float("-inf")
    table = torch.full((count + 2,), -77, device=impl.device)
    impl(keep_tokens)(ids.to(impl.device), values.to(impl.device), table)
    expected = [-1 if i % 3 == 0 else (7 + i) * 3 for i in range(count)]
    assert table.tolist() == [*expected, -77, -77]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("count", [1, 6, 300])
def test_kept_and_counted_where_a_row_has_a_slot(
    impl: Implementation, dtype: torch.dtype, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    slots = torch.randperm(2 * count, generator=generator)[:count]
    slots[1::3] = -1
    ids = torch.randint(17, (count,), generator=generator)
    values = torch.zeros(count)
    values[::5] = float("nan")
    counts = torch.randint(90, (2 * count, 17), generator=generator).to(dtype)
    expected = counts.clone()
    for slot, token in zip(slots.tolist(), ids.tolist(), strict=True):
        if slot >= 0:
            expected[slot, token] += GENERATED
    table, found = torch.zeros(count, dtype=torch.int64, device=impl.device), counts.to(impl.device)
    sent = (ids.to(impl.device), values.to(impl.device), table, found, slots.to(impl.device))
    impl(keep_tokens)(*sent)
    assert torch.equal(found.cpu(), expected)
    assert table.tolist() == [-1 if i % 5 == 0 else token for i, token in enumerate(ids.tolist())]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("count", [1, 6, 300])
def test_kept_tokens_are_on_one_side_of_the_host(impl: Implementation, count: int, side: int) -> None:
    ids, values = torch.arange(count) * 7 + 2**40, torch.zeros(count)
    values[::5] = float("nan")
    host = torch.full((2, count + 3), -77, pin_memory=impl.device == "cuda")
    sent = Sent(host, torch.tensor([side], dtype=torch.int32, device=impl.device))
    table = torch.zeros(count, dtype=torch.int64, device=impl.device)
    impl(keep_tokens)(ids.to(impl.device), values.to(impl.device), table, sent=sent)
    kept = table.tolist()  # waits for a GPU
    assert host[side].tolist() == [*kept, -77, -77, -77]
    assert kept == [-1 if i % 5 == 0 else 2**40 + 7 * i for i in range(count)]
    assert host[1 - side].tolist() == [-77] * (count + 3)


def test_the_host_s_tokens_need_room_and_two_sides() -> None:
    ids, side = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for host in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(IngotError, match="host"):
            keep_tokens(ids, ids.float(), ids, sent=Sent(host, side))
    with pytest.raises(IngotError, match="side has the wrong dtype"):
        keep_tokens(ids, ids.float(), ids, sent=Sent(torch.zeros(2, 3, dtype=torch.int64), side.long()))


def test_refused() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(IngotError, match="feed_rows has the wrong shape"):
        take_tokens(ids, ids[:2], ids)
    with pytest.raises(IngotError, match="rows is out of range"):
        keep_tokens(ids, ids.float(), ids[:2])
    with pytest.raises(IngotError, match="values has the wrong dtype"):
        keep_tokens(ids, ids, ids)
    with pytest.raises(IngotError, match="slots has the wrong shape"):
        keep_tokens(ids, ids.float(), ids, torch.zeros(2, 5, dtype=torch.int16), ids[:2])
    with pytest.raises(IngotError, match="counts has the wrong dtype"):
        keep_tokens(ids, ids.float(), ids, torch.zeros(2, 5), ids)
