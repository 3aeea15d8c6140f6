"""A step's tensors, also of padding rows after a larger step."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.kernels.attention.prefill_reference import NO_TILE
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.scheduling.inputs import EncoderEntry
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledRequest, layout_of
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.step_buffer import StepBuffer
from tests.unit.fake_gpu import LateGpu

ROWS, BLOCK_SIZE = 4, 4


def decode(name: str, length: int, offset: int = 0) -> ScheduledRequest:
    """The newest of ``length`` tokens."""
    blocks = list(range(-(-length // BLOCK_SIZE)))
    request = Request(name, list(range(length)), SamplingParams(), 99, rope_offset=offset, blocks=blocks)
    return ScheduledRequest(request, length - 1, 1, samples=True)


def test_rows_that_a_smaller_step_leaves_over_are_padding() -> None:
    """They write to no slot, attend to nothing and draw greedily, whatever was there before."""
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    draws = [RowSampling(0.7, seed=row, slot=row, repetition=1.5, mask=2 - row) for row in range(3)]
    buffer.fill(layout_of([decode("a", 9), decode("b", 5), decode("c", 3)], BLOCK_SIZE), draws)
    buffer.upload()
    assert buffer.padded_batch(1, 99).seq_lens.tolist() == [9, 5, 3, 0]
    drawn = buffer.draws(ROWS, draws)
    assert drawn.slot.tolist() == [0, 1, 2, -1]
    assert drawn.mask.tolist() == [2, 1, 0, -1]
    assert drawn.repetition.tolist()[:3] == [1.5] * 3
    buffer.fill(layout_of([decode("d", 6, offset=100)], BLOCK_SIZE), [RowSampling()])
    buffer.upload()
    batch = buffer.padded_batch(1, 99)
    assert batch.seq_lens.tolist() == [6, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [1 * BLOCK_SIZE + 1, -1, -1, -1]
    assert buffer.feed_rows.tolist() == [-1] * ROWS
    assert batch.query_start.tolist() == [0, 1, 1, 1, 1]
    assert batch.rope_rows[0] == 105
    drawn = buffer.draws(ROWS, [RowSampling()] * ROWS)
    assert drawn.temperature.tolist() == [0.0] * ROWS
    assert drawn.slot.tolist() == [-1] * ROWS
    assert drawn.mask.tolist() == [-1] * ROWS


def test_a_greedy_row_with_a_slot_has_its_rules() -> None:
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    rule = RowSampling(step=7, slot=2, repetition=1.1, presence=0.5, frequency=0.25, min_new=9, biased=3)
    buffer.fill(layout_of([decode("a", 9), decode("b", 5)], BLOCK_SIZE), [RowSampling(), rule])
    drawn = buffer.draws(2, [RowSampling(), rule])
    for name, value in rule._asdict().items():
        if name not in ("logprobs", "likeliest"):
            assert getattr(drawn, name).tolist()[1] == value, name
    assert drawn.slot.tolist() == [-1, 2]
    assert drawn.any_rules


def test_rows_without_rules_draw_by_their_own_values() -> None:
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    draws = [RowSampling(), RowSampling(0.7, top_k=5, top_p=0.9, min_p=0.1, seed=-3, step=2)]
    buffer.fill(layout_of([decode("a", 9), decode("b", 5)], BLOCK_SIZE), draws)
    drawn, expected = buffer.draws(2, draws), SamplingTensors.from_rows(draws, "cpu")
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step"):
        assert getattr(drawn, name).tolist() == getattr(expected, name).tolist(), name


@pytest.mark.parametrize(
    "rule",
    [{"mask": 0}, {"slot": 0, "min_new": 4}, {"transcript": 0, "last_time": 3, "paired": 1}, {"probed": 0}],
)
def test_a_row_may_have_one_rule_alone(rule: dict[str, int]) -> None:
    """The value 0 is one, too; afterwards, in a step without rules, it is gone."""
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    step = layout_of([decode("a", 9), decode("b", 5)], BLOCK_SIZE)
    draws = [RowSampling(), RowSampling(**rule)]
    buffer.fill(step, draws)
    drawn, expected = buffer.draws(2, draws), SamplingTensors.from_rows(draws, "cpu")
    for name in ("slot", "mask", "transcript", "probed", *rule):
        assert getattr(drawn, name).tolist() == getattr(expected, name).tolist(), name
    assert (drawn.any_masks, drawn.any_rules) == ("mask" in rule, "slot" in rule)
    buffer.fill(step, [RowSampling()] * 2)
    drawn = buffer.draws(2, [RowSampling()] * 2)
    for name in ("slot", "mask", "transcript", "probed"):
        assert getattr(drawn, name).tolist() == [-1, -1], name


def test_blocks_that_another_request_got_are_written_again() -> None:
    """Also where as many are in the row already, and in the very list that was there before."""
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    items = [decode("a", 9), decode("b", 9)]
    buffer.fill(layout_of(items, BLOCK_SIZE))
    items[0].request.blocks[:] = [6, 7, 3]
    items[1].request.blocks = [5, 4, 3]
    buffer.fill(layout_of(items, BLOCK_SIZE))
    assert buffer.host["block_tables"][:2, :3].tolist() == [[6, 7, 3], [5, 4, 3]]
    buffer.fill(layout_of(items[::-1], BLOCK_SIZE))
    assert buffer.host["block_tables"][:2, :3].tolist() == [[5, 4, 3], [6, 7, 3]]


def test_a_chunk_s_tokens_lie_in_its_blocks() -> None:
    request = Request("a", list(range(50, 60)), SamplingParams(), 99, rope_offset=7, blocks=[5, 2, 9])
    buffer = StepBuffer(8, ROWS, 8, ROWS, torch.device("cpu"))
    buffer.fill(layout_of([ScheduledRequest(request, 2, 8, samples=True)], BLOCK_SIZE))
    buffer.upload()
    batch = buffer.padded_batch(8, 99)
    assert batch.input_ids.tolist() == list(range(52, 60))
    assert batch.positions.tolist() == list(range(2, 10))
    assert batch.rope_rows.tolist() == list(range(9, 17))
    assert batch.slot_mapping.tolist() == [22, 23, 8, 9, 10, 11, 36, 37]
    assert batch.logits_indices.tolist()[0] == 7


def test_decodes_beside_chunks() -> None:
    """Decodes first and a last token after a chunk; a chunk that does not sample wants no logits."""
    request = Request("a", list(range(50, 60)), SamplingParams(), 99, rope_offset=7, blocks=[5, 2, 9])
    chunk = ScheduledRequest(request, 1, 3, samples=False)
    buffer = StepBuffer(8, ROWS, 8, ROWS, torch.device("cpu"))
    items = [decode("b", 6, offset=100), decode("c", 3), chunk, decode("d", 9)]
    buffer.fill(layout_of(items, BLOCK_SIZE))
    buffer.upload()
    batch = buffer.padded_batch(3, 99)
    assert batch.input_ids.tolist()[:6] == [5, 2, 51, 52, 53, 8]
    assert batch.positions.tolist()[:6] == [5, 2, 1, 2, 3, 8]
    assert batch.rope_rows.tolist()[:6] == [105, 2, 8, 9, 10, 8]
    assert batch.slot_mapping.tolist()[:6] == [5, 2, 21, 22, 23, 8]
    assert batch.query_start.tolist() == [0, 1, 2, 5, 6]
    assert batch.seq_lens.tolist() == [6, 3, 4, 9]
    assert batch.logits_indices.tolist()[:3] == [0, 1, 5]


def chunk(name: str, start: int, count: int) -> ScheduledRequest:
    blocks = list(range(-(-(start + count) // BLOCK_SIZE)))
    request = Request(name, list(range(start + count)), SamplingParams(), 99, blocks=blocks)
    return ScheduledRequest(request, start, count, samples=True)


def test_a_captured_step_knows_which_rows_decode() -> None:
    """Then which tiles of chunks there are, the ones with most keys first; nothing stays of a step before."""
    buffer = StepBuffer(8, ROWS, 8, ROWS, torch.device("cpu"), tile_rows=2)
    none = (0, NO_TILE)

    def filled(*items: ScheduledRequest) -> tuple[list[int], list[tuple[int, int]]]:
        buffer.fill(layout_of(list(items), BLOCK_SIZE))
        buffer.upload()
        split = buffer.padded_batch(8, 99).split
        assert split is not None
        assert split.tile_rows == 2
        assert split.tile_parts == 0
        tiles = split.tile_list.tolist()
        assert all(tile[2:] == [0, 1] for tile in tiles), "whole"
        return split.decode_lens.tolist(), [(request, tile) for request, tile, *_ in tiles]

    first = filled(decode("a", 6), decode("b", 9), chunk("c", 0, 3), chunk("d", 7, 3))
    assert first == ([6, 9, 0, 0], [(3, 1), (3, 0), (2, 1), (2, 0), *[none] * 4])
    assert filled(chunk("e", 2, 8)) == ([0] * 4, [(0, 3), (0, 2), (0, 1), (0, 0), *[none] * 4])
    assert filled(decode("f", 3)) == ([3, 0, 0, 0], [none] * 8)


def test_a_captured_request_alone_is_a_chunk() -> None:
    buffer = StepBuffer(16, 1, 8, 1, torch.device("cpu"), tile_rows=16)
    buffer.fill(layout_of([decode("a", 6)], BLOCK_SIZE))
    buffer.upload()
    split = buffer.padded_batch(16, 99).split
    assert split is not None
    assert len(split.decode_lens) == 0
    assert split.tile_list.tolist()[0] == [0, 0, 0, 1]


def test_the_keys_of_few_tiles_are_cut_into_parts() -> None:
    """Those of the longest contexts, whose parts stand first; a short prompt beside them stays whole."""
    buffer = StepBuffer(8, ROWS, 1024, ROWS, torch.device("cpu"), 1, tile_rows=4, tile_parts=4)

    def filled(*items: ScheduledRequest) -> list[list[int]]:
        buffer.fill(layout_of(list(items), BLOCK_SIZE))
        buffer.upload()
        batch = buffer.padded_batch(8, 4096)
        assert batch.split is not None
        assert batch.split.tile_parts == 4
        assert len(batch.split.tile_list) == 2 + 4, "tiles and short ones"
        assert batch.arrivals is not None
        assert len(batch.arrivals) >= 4 * 2, "for parts of two heads"
        return [entry for entry in batch.split.tile_list.tolist() if entry != [0, NO_TILE, 0, 1]]

    four = [[1, 0, part, 4] for part in range(4)]
    assert filled(decode("a", 6), chunk("b", 3000, 4)) == four
    assert filled(decode("a", 6), chunk("c", 0, 3)) == [[1, 0, 0, 1]]
    two = [[1, tile, part, 2] for tile in (1, 0) for part in range(2)]
    assert filled(decode("a", 6), chunk("d", 3000, 6)) == two
    long = [[2, 0, part, 3] for part in range(3)]
    assert filled(decode("a", 6), chunk("c", 0, 3), chunk("b", 3000, 4)) == [*long, [1, 0, 0, 1]]


def test_rows_attend_to_their_own_inputs_after_other_requests() -> None:
    """A table that has not changed is not written again."""

    def buffer() -> StepBuffer:
        return StepBuffer(
            ROWS, ROWS, 8, ROWS, torch.device("cpu"), encoded_positions=12, block_size=BLOCK_SIZE
        )

    items = {name: decode(name, 5) for name in "abcd"}
    for number, item in enumerate(list(items.values())[:3]):
        positions = 12 - 4 * number
        blocks = [7 * number + block for block in range(positions // BLOCK_SIZE)]
        item.request.encoded[0] = EncoderEntry(bytes([number]), blocks, positions)
    kept = buffer()
    for names in ("abc", "bca", "b", "dab", "dba", "", "cb"):
        step = layout_of([items[name] for name in names], BLOCK_SIZE)
        fresh = buffer()
        for one in (kept, fresh):
            one.fill(step)
        for name in ("encoded_lens", "encoded_rows"):
            assert kept.host[name].tolist() == fresh.host[name].tolist(), names
        for row, length in enumerate(kept.host["encoded_lens"]):
            tables = (
                one.host["encoded_tables"][row, : length // BLOCK_SIZE].tolist() for one in (kept, fresh)
            )
            assert len({tuple(table) for table in tables}) == 1, names


def test_rows_that_change_hands_are_written_again() -> None:
    """As many requests of other counts, also after padding, begin at rows of their own."""
    buffer = StepBuffer(8, ROWS, 8, ROWS, torch.device("cpu"), encoded_positions=12, block_size=BLOCK_SIZE)
    for items in ([decode("a", 5), chunk("b", 0, 3)], [decode("a", 6), chunk("b", 3, 2)]):
        buffer.fill(layout_of(items, BLOCK_SIZE))
        end = 1 + items[1].count
        assert buffer.host["query_start"].tolist() == [0, 1, end, end, end]
        assert buffer.host["encoded_rows"].tolist() == [0] + [1] * (end - 1) + [ROWS] * (8 - end)
    alone = layout_of([decode("a", 7)], BLOCK_SIZE)
    for _ in range(2):
        buffer.fill(alone)
        assert buffer.host["query_start"].tolist() == [0, 1, 1, 1, 1]
        buffer.fill_padding()
        assert buffer.host["query_start"].tolist() == [0, 1, 2, 3, 4]
    buffer.fill(layout_of([], BLOCK_SIZE))
    assert buffer.host["query_start"].tolist() == [0] * 5


def test_a_host_buffer_is_not_written_while_the_device_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is late: it reads an upload no sooner than somebody waits for it."""
    gpu = LateGpu(monkeypatch, "ingot.runtime.step.step_buffer")
    read: list[list[int]] = []

    def upload(host: torch.Tensor, out: torch.Tensor, *feed: Any) -> None:
        def copy() -> None:
            out.copy_(host)
            read.append(buffer.feed_rows.tolist() + buffer.padded_batch(1, 99).input_ids.tolist())

        gpu.work.append(copy)

    monkeypatch.setattr("ingot.runtime.step.step_buffer.upload_step", upload)
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cuda"))
    lengths = [9, 5, 3, 7, 6, 4]
    for length in lengths:
        buffer.fill(layout_of([decode("a", length)], BLOCK_SIZE))
        buffer.upload()
    assert len(read) == len(lengths) - 2, "two steps may be in flight"
    buffer.wait_until_read()
    assert not gpu.work
    assert [row[ROWS] for row in read] == [length - 1 for length in lengths]


def test_a_buffer_that_is_dropped_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(monkeypatch, "ingot.runtime.step.step_buffer")
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cuda"))
    buffer.fill(layout_of([decode("a", 3)], BLOCK_SIZE))
    buffer.upload()
    gpu.fail()
    buffer.wait_until_read()
    buffer = StepBuffer(ROWS, ROWS, 8, ROWS, torch.device("cpu"))
    buffer.wait_until_read()  # there is nothing to wait for


@pytest.mark.parametrize("fails", [False, True])
def test_a_warm_up_s_buffers_are_read_before_they_are_dropped(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LateGpu(monkeypatch, "ingot.runtime.step.step_buffer")
    read: list[int] = []
    dropped: list[tuple[int, bool]] = []

    def padding(tokens: int, requests: int) -> tuple[StepBuffer, None]:
        upload = partial(read.append, tokens)
        monkeypatch.setattr(
            "ingot.runtime.step.step_buffer.upload_step", lambda *given: gpu.work.append(upload)
        )
        buffer = StepBuffer(tokens, requests, 8, ROWS, torch.device("cuda"))
        buffer.fill(layout_of([], BLOCK_SIZE))
        buffer.upload()
        weakref.finalize(buffer, lambda: dropped.append((tokens, tokens in read)))
        return buffer, None

    def launch(buffer: StepBuffer, batch: None) -> None:
        if fails:
            raise KeyError("a kernel that cannot be built")

    graphs: Any = PromptGraphs.__new__(PromptGraphs)
    vars(graphs).update(sizes=lambda *most: [(16, 1), (32, 1)], _padding=padding, _launch_once=launch)
    if fails:
        with pytest.raises(KeyError, match="cannot be built"):
            graphs.launch_all(1, 32)
    else:
        graphs.launch_all(1, 32)
    assert dropped == ([(16, True)] if fails else [(16, True), (32, True)])
