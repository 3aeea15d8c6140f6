"""Which inputs a model with an encoder takes, at each limit."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.layers.step_layout import StepInputs
from ingot.llm.prompt_inputs import Entry
from ingot.runtime.encoding.prompt_rows import RowRules, rows_of
from ingot.runtime.scheduling.inputs import EncoderEntry, InputRules
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, layout_of

SIZE, MOST = 3, 6  # a feature's channels; the encoder gives a position for each two of its rows


def rules(kind: str = "cross", cache: int = MOST, most: int = MOST) -> InputRules:
    encoder: Any = SimpleNamespace(positions=lambda shape: shape[0] // 2, longest=(2 * MOST, SIZE))
    config: Any = SimpleNamespace(
        max_positions=most,
        placeholder_id=17,
        features=(None, SIZE),
        takes=lambda shape: len(shape) == 2 and shape[1] == SIZE,
    )
    model: Any = SimpleNamespace(encoder=config, splices=kind == "prefix", crosses=kind == "cross")
    return InputRules(model, encoder, cache)


@pytest.mark.parametrize(("cache", "most"), [(4, MOST), (MOST, 4), (4, 4)])
def test_an_input_has_as_many_positions_as_the_model_and_the_cache_have(cache: int, most: int) -> None:
    taken = rules(cache=cache, most=most)
    assert taken.read(torch.ones(8, SIZE), 0).positions == 4
    assert taken.read(torch.ones(2, SIZE), 0).positions == 1
    for rows, seen in ((10, 5), (1, 0), (0, 0)):
        with pytest.raises(RequestError, match=rf"{seen} positions of features \[{rows}, 3\].*1 to 4"):
            taken.read(torch.ones(rows, SIZE), 0)


@pytest.mark.parametrize(("kind", "tokens"), [("cross", 0), ("prefix", 4)])
def test_placeholders_are_as_many_as_positions_where_they_are_spliced(kind: str, tokens: int) -> None:
    taken = rules(kind)
    one = taken.read(torch.ones(8, SIZE), 5)
    assert (one.place, one.tokens, one.end, one.positions) == (5, tokens, 5 + tokens, 4)
    assert taken.placeholders(one) == [17] * tokens
    read = [one.is_read_by(*span) for span in ((0, 5), (0, 6), (4, 9), (8, 9), (9, 12))]
    assert read == ([False, True, True, True, False] if tokens else [True] * 5)


def test_equal_inputs_have_one_digest_and_others_another() -> None:
    """Of shape and values, whatever their dtype; a name stands for both."""
    taken, rows = rules(), torch.arange(12.0)
    digest = taken.read(rows.view(4, SIZE), 0).digest
    assert taken.read(rows.view(4, SIZE).double(), 3).digest == digest
    assert taken.read(rows.view(4, SIZE).long(), 0).digest == digest
    assert taken.read(rows.view(4, SIZE).roll(1, 0), 0).digest != digest
    config: Any = taken.config
    config.takes = lambda shape: True
    assert taken.read(rows.view(2, 6), 0).digest != digest
    named = taken.read(rows.view(4, SIZE), 0, name=b"it")
    assert (named.digest, named.features.dtype) == (b"it", torch.float32)
    assert torch.equal(named.features, rows.view(4, SIZE))


@pytest.mark.parametrize("cache", [MOST - 1, MOST, MOST + 1])
def test_the_longest_input_represents_others_if_it_fits_the_cache(cache: int) -> None:
    found = rules(cache=cache).blank(2.5)
    assert (found is None) is (cache < MOST)
    if found is not None:
        assert torch.equal(found.features, torch.full((2 * MOST, SIZE), 2.5))
        assert (found.positions, found.place) == (MOST, 0)


@pytest.mark.parametrize("kind", ["cross", "prefix"])
def test_a_model_that_attends_to_its_input_takes_one(kind: str) -> None:
    taken = rules(kind)
    inputs = [taken.read(torch.ones(4, SIZE), 0) for _ in range(2)]
    taken.check([])
    taken.check(inputs[:1])
    if kind == "prefix":
        taken.check(inputs)
    else:
        with pytest.raises(RequestError, match=r"takes one input.*2 inputs"):
            taken.check(inputs)
    broken = torch.ones(4, SIZE)
    broken[1, 2] = float("nan")
    with pytest.raises(RequestError, match="1 of 12 are NaN or infinite"):
        taken.check([taken.read(broken, 0)])


@pytest.mark.parametrize("features", ["text", [[1, "a"]], torch.ones(4, SIZE + 1), torch.ones(4), None])
def test_features_are_tensors_of_the_model_s_shape(features: object) -> None:
    with pytest.raises(RequestError):
        rules().read(features, 0)


def test_rows_and_features_of_the_same_values_have_other_digests() -> None:
    """Else one would be found in the prefix cache in the place of the other."""
    values = torch.arange(12.0).view(4, SIZE)
    taken = RowRules(SIZE, torch.float32, rotated=False, taken=True)
    rows = taken.read(values, 5)
    assert rows.digest != rules("prefix").read(values, 5).digest
    assert rows.digest == taken.read(values.double(), 9).digest
    assert rows.digest != taken.read(values.roll(1, 0), 5).digest
    assert (rows.place, rows.tokens, rows.positions, rows.encodes) == (5, 4, 4, False)


def test_which_steps_have_rows_and_where() -> None:
    """They run without a graph: a captured one would compute the ids that stand for rows."""
    rows = RowRules(SIZE, torch.float32, rotated=False, taken=True).read(torch.arange(12.0).view(4, SIZE), 2)
    features = rules("prefix").read(torch.ones(8, SIZE), 6)
    request = Request(
        "r", [5, 6, 0, 0, 0, 0, 17, 17, 17, 17, 9], SamplingParams(), 20, inputs=(rows, features)
    )
    request.blocks, request.encoded[1] = [0, 1, 2], EncoderEntry(b"", [0, 1], 8)
    other = ScheduledRequest(Request("o", [1, 2, 3], SamplingParams(), 9, blocks=[3]), 0, 3, samples=True)

    def slots(start: int, count: int) -> list[int] | None:
        items = [other, ScheduledRequest(request, start, count, samples=False)]
        step = ScheduledBatch(items, layout=layout_of(items, 4))
        found = rows_of(step, None, torch.device("cpu"))
        assert bool(step.layout.inputs.brought) is (found is not None)
        if found is None:
            return None
        taken = found.slots >= 0
        values = found.table[found.slots[taken], 0] / SIZE
        return [int(place) for place in taken.nonzero()] + [int(value) for value in values]

    assert slots(0, 11) == [5, 6, 7, 8, 0, 1, 2, 3]
    assert slots(3, 2) == [3, 4, 1, 2]
    assert slots(5, 1) == [3, 3]
    assert slots(0, 2) is None
    assert slots(6, 5) is None
    assert Entry(request.prompt_ids, inputs=(rows, features)).context == [9]
    assert Entry(request.prompt_ids, inputs=(rows,)).context == [17, 17, 17, 17, 9]
    assert Entry([4, 5]).context == [4, 5]
    assert Entry([4, 5], is_chat=True).context == []


def test_a_step_of_the_last_placeholder_alone_has_its_row() -> None:
    """And the step after it has none."""
    rows = RowRules(SIZE, torch.float32, rotated=False, taken=True).read(torch.arange(12.0).view(4, SIZE), 2)
    features = rules("prefix").read(torch.ones(8, SIZE), 6)
    first = Request("r", [5, 6, 0, 0, 0, 0, 9], SamplingParams(), 20, inputs=(rows,), blocks=[0, 1])
    both = Request("b", [5, 6, *[0] * 4, *[17] * features.tokens, 9], SamplingParams(), 30)
    both.inputs, both.blocks = (rows, features), [0, 1, 2, 3]
    both.encoded[1] = EncoderEntry(b"", [3, 7], features.positions)

    def inputs(request: Request, start: int) -> StepInputs:
        return layout_of([ScheduledRequest(request, start, 1, samples=False)], 4).inputs

    assert inputs(first, 5).brought == [(0, 0, 5, 6)]
    assert not inputs(first, 6).brought
    last = features.end - 1
    spliced, place = inputs(both, last).spliced, features.tokens - 1
    assert spliced is not None
    assert spliced.tolist() == [[3, 7][place // 4] * 4 + place % 4]
    assert inputs(both, last + 1).spliced is None


def test_one_request_with_an_input_among_others() -> None:
    """First, in the middle or last; the others have tables of nothing."""
    with_one = Request("a", [5, 6], SamplingParams(), 20, blocks=[0])
    with_one.encoded[0] = EncoderEntry(b"", [3, 7], 6)
    for place in range(3):
        items = [Request(f"r{i}", [5, 6], SamplingParams(), 20, blocks=[i + 1]) for i in range(2)]
        items.insert(place, with_one)
        found = layout_of([ScheduledRequest(one, 1, 1, samples=True) for one in items], 4).inputs
        assert list(found.encoded_lens) == [6 * (at == place) for at in range(3)]
    assert not layout_of([ScheduledRequest(items[0], 1, 1, samples=True)], 4).inputs.encoded_lens


@pytest.mark.parametrize("what", ["inputs", "rows"])
def test_a_fork_reads_inputs_in_threads_of_its_own(what: str) -> None:
    """Those of the process that forked are not there."""
    read = rules().read if what == "inputs" else RowRules(SIZE, torch.float32, rotated=False, taken=True).read
    for _ in range(4):
        read(torch.ones(2, SIZE), 0).content.result()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            found = [read(torch.ones(2, SIZE), 0).content.result(timeout=5) for _ in range(8)]
            status = 0 if len(found) == 8 else 1
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
