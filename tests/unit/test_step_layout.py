"""A step's layout: rows by request and purpose, also in another process."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot import LLM
from ingot.config.sampling_params import SamplingParams
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.step_layout import TOKEN_ROWS, StepLayout
from ingot.runtime.scheduling.inputs import EncoderEntry
from ingot.runtime.scheduling.request import Probe, Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.step.step_buffer import StepBuffer
from tests.tiny_models import random_ids, save_model, tiny_config


def drafted(*wanted: int) -> tuple[StepLayout, list[list[int]]]:
    """A decode, a request with three drafts after its last token, and a chunk of a prompt."""
    blocks = [[5, 2], [0, 7, 1], [3]]
    ids = list(range(10, 18))
    layout = StepLayout.of([5, 8, 0], [1, 4, 3], blocks, 4, wanted=wanted, input_ids=ids)
    return layout, blocks


def token_rows(layout: StepLayout) -> dict[str, list[int]]:
    return dict(zip(TOKEN_ROWS, layout.tokens.tolist(), strict=True))


def test_a_request_may_want_several_rows() -> None:
    layout, _ = drafted(1, 4, 0)
    assert layout.logits_indices == [0, 1, 2, 3, 4]
    assert [layout.logits_of(i) for i in range(3)] == [slice(0, 1), slice(1, 5), slice(5, 5)]
    assert [layout.rows_of(i) for i in range(3)] == [slice(0, 1), slice(1, 5), slice(5, 8)]
    assert drafted(1, 2, 1)[0].logits_indices == [0, 3, 4, 7]
    assert drafted(0, 0, 3)[0].logits_indices == [5, 6, 7]
    assert (layout.num_single, layout.max_query_len, layout.num_requests) == (1, 4, 3)
    assert not layout.only_decodes


def test_rows_lie_in_their_requests_blocks() -> None:
    layout, _ = drafted(1, 4, 0)
    tokens = token_rows(layout)
    assert tokens["input_ids"] == list(range(10, 18))
    assert tokens["positions"] == [5, 8, 9, 10, 11, 0, 1, 2]
    assert tokens["slot_mapping"] == [9, 4, 5, 6, 7, 12, 13, 14]
    assert tokens["feed_rows"] == [-1] * 8
    assert layout.seq_lens == [6, 12, 3]
    assert layout.query_start == [0, 1, 5, 8]


def test_which_steps_are_decodes_alone() -> None:
    def of(counts: list[int], wanted: list[int], probes: tuple[int, ...] = ()) -> bool:
        blocks = [[0]] * len(counts)
        return StepLayout.of([0] * len(counts), counts, blocks, 4, wanted=wanted, probes=probes).only_decodes

    assert of([1, 1], [1, 1])
    assert not of([1, 1], [1, 0]), "one is in the middle of its prompt"
    assert not of([1, 1], [1, 0], probes=(1,))
    assert not of([1, 1], [1, 1], probes=(1,))
    assert not of([1, 2], [1, 1])
    assert not of([2, 1], [1, 1])


@pytest.mark.parametrize("wanted", [(1, 4, 0), (0, 2, 3)])
def test_a_buffer_and_tensors_of_their_own_agree(wanted: tuple[int, ...]) -> None:
    layout, _ = drafted(*wanted)
    buffer = StepBuffer(9, 4, 8, 9, torch.device("cpu"))
    buffer.fill(layout)
    filled = buffer.batch_of(layout, 64)
    own = ForwardBatch.of(layout, torch.device("cpu"), max_seq_len=64)
    for field in fields(ForwardBatch):
        first, second = getattr(filled, field.name), getattr(own, field.name)
        if field.name == "block_tables":
            first = first[:, : second.shape[1]]
        if isinstance(second, torch.Tensor):
            assert torch.equal(first, second), field.name
            assert first.dtype == second.dtype, field.name
        else:
            assert first == second, field.name


def busy_layout() -> StepLayout:
    """Pending tokens, a probe, an input that is encoded; the blocks of one request grow later."""
    pending = Request("p", [1, 2, 3], SamplingParams(), 9, blocks=[4], num_pending=1, pending_row=6)
    asked = Request("q", [5, 6, 7, 8], SamplingParams(), 9, blocks=[1], rope_offset=3, probe=Probe(1, 2))
    asked.encoded[0] = EncoderEntry(b"", [8, 9], 7)
    return layout_of([ScheduledRequest(pending, 3, 1, 1), ScheduledRequest(asked, 0, 4, 1)], 4)


def test_a_layout_survives_a_pipe() -> None:
    """So that a step may be laid out in one process and run in others."""
    layout = busy_layout()
    sent = pickle.loads(pickle.dumps(layout))
    for field in fields(StepLayout):
        first, second = getattr(layout, field.name), getattr(sent, field.name)
        if isinstance(first, np.ndarray):
            assert np.array_equal(first, second), field.name
            assert first.dtype == second.dtype, field.name
        elif field.name == "inputs":
            tables = [[table.tolist() for table in side.encoded_tables] for side in (first, second)]
            assert tables == [[[], [8, 9]]] * 2
            assert first[1:] == second[1:]
        else:
            assert first == second, field.name
    sides = [StepBuffer(8, 4, 8, 8, torch.device("cpu"), 0, 8, 4) for _ in range(2)]
    for one, buffer in zip((layout, sent), sides, strict=True):
        buffer.fill(one)
    for name, values in sides[0].host.items():
        assert np.array_equal(values, sides[1].host[name]), name


def test_a_layout_marks_pending_and_probed_rows() -> None:
    layout = busy_layout()
    tokens = token_rows(layout)
    assert tokens["feed_rows"] == [6, -1, -1, -1, -1]
    assert tokens["input_ids"] == [0, 5, 6, 7, 8]
    assert tokens["rope_rows"] == [3, 3, 4, 5, 6]
    assert layout.logits_indices == [0, 4, 2], "the probe's row is last"
    assert (layout.num_probes, layout.num_logits, layout.logits_ends) == (1, 3, [1, 2])
    assert layout.inputs.encoded_lens == [0, 7]
    assert layout.some_without_input


def test_a_chunk_ends_with_its_pending_token() -> None:
    """Drafts that follow it are to come: so far a pending token is the last of a request."""
    request = Request(
        "p", [1, 2, 3], SamplingParams(), 9, blocks=[4], rope_offset=2, num_pending=1, pending_row=6
    )
    layout = layout_of([ScheduledRequest(request, 1, 3, 1)], 4)
    tokens = token_rows(layout)
    assert tokens["input_ids"] == [2, 3, 0]
    assert tokens["feed_rows"] == [-1, -1, 6]
    assert tokens["rope_rows"] == [3, 4, 5]


def test_drafts_run_through_a_step(tmp_path: Path) -> None:
    """Three wanted rows of one request, between a decode and a prompt, give the logits of each row."""
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, max_batch_size=4)
    prompts = [random_ids(count, seed=count) for count in (9, 21, 6)]
    expected = [llm.logits(prompt) for prompt in prompts]
    runner, blocks = llm.executor.runner, llm.executor.blocks
    own = [Request(str(i), prompt, SamplingParams(), 64) for i, prompt in enumerate(prompts)]
    for request in own:
        assert blocks.grow(request, request.num_tokens)
    first = [ScheduledRequest(own[0], 0, 8, 0), ScheduledRequest(own[1], 0, 17, 0)]
    runner.run(ScheduledBatch(first, layout=layout_of(first, runner.block_size)))
    items = [
        ScheduledRequest(own[0], 8, 1, samples=1),
        ScheduledRequest(own[1], 17, 4, samples=3),
        ScheduledRequest(own[2], 0, 6, samples=1),
    ]
    layout = pickle.loads(pickle.dumps(layout_of(items, runner.block_size)))
    logits = runner.run(ScheduledBatch(items, layout=layout))
    assert logits.shape[0] == 5
    for index, wanted in enumerate((1, 3, 1)):
        torch.testing.assert_close(
            logits[layout.logits_of(index)].float(), expected[index][-wanted:], rtol=1e-4, atol=1e-5
        )
