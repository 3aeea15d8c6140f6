"""A step's record keeps values that are overwritten afterwards."""

from __future__ import annotations

import torch

from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.layers.observer import both
from ingot.layers.step_record import StepRecord


def closed(record: StepRecord, slots: list[int], *caches: torch.Tensor) -> StepRecord:
    record.close({"slot_mapping": torch.tensor(slots)}, [caches], torch.ones(1, 4))
    return record


def test_recorded_values_are_copies() -> None:
    record, hidden = StepRecord(), torch.ones(2, 3)
    rows = Int8Rows(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), 0)
    record.see("stream", hidden)
    record.see("inner", rows)
    for tensor in (hidden, rows.values, rows.scales):
        tensor.zero_()
    inner = record.values["inner"][0]
    assert isinstance(inner, Int8Rows)
    for kept in (record.values["stream"][0], inner.values, inner.scales):
        assert isinstance(kept, torch.Tensor)
        assert bool((kept == 1).all())


def test_a_record_on_the_host_outlives_the_next_replay() -> None:
    record, keys = StepRecord(), torch.ones(1, 1, 2, 1)
    record.see("stream", torch.ones(2, 3))
    host = closed(record, [0, 1], keys).on_host()
    written = [*record.values["stream"], *record.cached[0], *record.inputs.values(), record.logits]
    for tensor in written:
        assert isinstance(tensor, torch.Tensor)
        tensor.fill_(7)
    kept = [*host.values["stream"], *host.cached[0], *host.inputs.values(), host.logits]
    assert len(kept) == len(written)
    assert not any(bool((tensor == 7).any()) for tensor in kept)


def test_of_a_cache_the_tokens_of_the_step_are_kept_in_their_order() -> None:
    blocks = torch.arange(24.0).view(3, 2, 4, 1)  # [blocks, heads, tokens of a block, head_dim]
    (tensors,) = closed(StepRecord(), [9, 2, -1], blocks).cached
    assert tensors[0][:2].flatten(1).tolist() == [[17, 21], [2, 6]]
    assert len(tensors[0]) == 3  # padding keeps its row


def test_rows_in_the_operands_order_are_kept_in_their_own() -> None:
    rows, record = torch.arange(64.0).view(2, 32), StepRecord()
    record.see("inner", operand_rows(rows))
    (kept,) = record.values["inner"]
    assert isinstance(kept, torch.Tensor)
    torch.testing.assert_close(kept, rows)


def test_two_observers_see_the_same() -> None:
    records = StepRecord(), StepRecord()
    for first in (None, records[0].see):
        both(first, records[1].see)("stream", torch.ones(2, 3))
    assert [len(record.values["stream"]) for record in records] == [1, 2]
