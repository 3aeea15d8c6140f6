"""Each rule against Hugging Face's processor or its definition, and kept counts against a fresh start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ingot.config.sampling_params import SamplingParams
from ingot.kernels.sampling.token_penalties import GENERATED, count_dtype
from ingot.runtime.beam_group import BeamGroup
from ingot.runtime.encoding.recording import Recorder
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import EMPTY
from ingot.runtime.selection import TokenSelector
from ingot.runtime.step.graphs import KINDS
from ingot.runtime.step.sampled_step import leave_tokens
from ingot.runtime.step.step_buffer import StepBuffer
from tests.unit.penalized import penalized, under_rules

VOCAB = 61
PROMPT = [3, 7, 7, 60, 0]
EOS = frozenset({2, 5})
EVERY_RULE = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.3, min_new_tokens=4
)
CPU = torch.device("cpu")


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, VOCAB, generator=generator) * 5


def outputs(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def apply(params: SamplingParams, logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
    return penalized(params, PROMPT, output_ids, EOS, logits)


def of(*params: SamplingParams, output_ids: Sequence[int] = ()) -> list[Request]:
    return [Request(f"r{i}", PROMPT, one, 999, output_ids=list(output_ids)) for i, one in enumerate(params)]


def test_only_rules_take_slots() -> None:
    counts = TokenCounts(4, VOCAB, 99, CPU)
    selector = TokenSelector(EOS, counts)
    plain = (SamplingParams(temperature=1.0, logprobs=2), SamplingParams(min_new_tokens=3, ignore_eos=True))
    assert [row.slot for row in selector.draws(of(*plain), counted=True)] == [-1, -1]
    assert counts._table is None, "made for the first that asks"
    rules = [SamplingParams(repetition_penalty=1.1), SamplingParams(presence_penalty=0.1)]
    requests = of(*rules, SamplingParams(min_new_tokens=1), SamplingParams(logit_bias={4: 1.0}))
    assert sorted(row.slot for row in selector.draws(requests, counted=False)) == [0, 1, 2, 3]
    requests[2].output_ids.append(1)
    assert selector.draws(requests, counted=False)[2].slot == -1, "long enough to end"


@pytest.mark.parametrize("odd", [VOCAB, VOCAB + 1, 2 * VOCAB, -1])
def test_an_id_outside_of_the_vocabulary_counts_nowhere(odd: int) -> None:
    """A picture's placeholder may be one: its neighbours in the table are other requests' tokens."""
    counts = TokenCounts(3, VOCAB, 99, CPU)
    prompts = [[1, 2], [odd, 3, odd], [4]]
    params = SamplingParams(repetition_penalty=1.1)
    requests = [Request(str(i), ids, params, 99) for i, ids in enumerate(prompts)]
    requests[1].output_ids += [odd, 5]
    slots = counts.slots(requests, [()] * 3, counted=False)
    assert sorted(slots) == [0, 1, 2]
    seen = [counts.table[slot].nonzero().flatten().tolist() for slot in slots]
    assert seen == [[1, 2], [3, 5], [4]]


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_repetition_penalty_equals_hugging_face(penalty: float, length: int) -> None:
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    output_ids = outputs(length)
    for row in rows(4):
        expected = reference(torch.tensor([PROMPT + output_ids]), row[None].clone())[0]
        assert torch.equal(apply(SamplingParams(repetition_penalty=penalty), row, output_ids), expected)
        assert not torch.equal(expected, row)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 1.1), (-2.0, 0.4)])
def test_count_penalties_follow_the_definition(presence: float, frequency: float) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    output_ids = [9, 9, 9, 4, *outputs(30)]
    row = rows(1)[0]
    expected = [
        score - presence * (token in output_ids) - frequency * output_ids.count(token)
        for token, score in enumerate(row.tolist())
    ]
    torch.testing.assert_close(apply(params, row, output_ids), torch.tensor(expected))


def test_a_bias_equals_hugging_face_and_comes_before_penalties() -> None:
    bias = {60: 3.5, 0: -100.0, 9: 0.25, 4: 7.0}
    reference = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    output_ids = [9, 9, 4, *outputs(10)]
    ids = torch.tensor([PROMPT + output_ids])
    for row in rows(4):
        expected = reference(ids, row[None].clone())
        assert torch.equal(apply(SamplingParams(logit_bias=bias), row, output_ids), expected[0])
        assert not torch.equal(expected[0], row)
        both = SamplingParams(logit_bias=bias, repetition_penalty=1.7)
        expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)
        assert torch.equal(apply(both, row, output_ids), expected[0])


@pytest.mark.parametrize("length", [0, 3, 4, 5])
def test_min_new_tokens_equals_hugging_face(length: int) -> None:
    reference = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, sorted(EOS | {11}))
    output_ids = outputs(length)
    row = rows(1)[0]
    expected = reference(torch.tensor([PROMPT + output_ids]), row[None])[0]
    params = SamplingParams(min_new_tokens=4, stop_token_ids=(11,))
    assert torch.equal(apply(params, row, output_ids), expected)
    assert torch.isinf(expected).sum() == (3 if length < 4 else 0)


def test_ignore_eos_leaves_eos_allowed() -> None:
    params = SamplingParams(min_new_tokens=4, stop_token_ids=(11,), ignore_eos=True)
    banned = torch.isinf(apply(params, rows(1)[0], []))
    assert banned.nonzero().flatten().tolist() == [11]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    params = EVERY_RULE.replace(stop_token_ids=(VOCAB,))
    row = rows(1)[0]
    strange = penalized(params, [*PROMPT, -1, VOCAB + 100], [4, VOCAB], EOS, row)
    assert torch.equal(strange, apply(EVERY_RULE, row, [4]))


def test_kept_counts_equal_a_fresh_start() -> None:
    """Growth by one, by many and by none; a preemption; another request in the same slot."""
    counts = TokenCounts(1, VOCAB, 999, CPU)
    selector, long = TokenSelector(EOS, counts), outputs(700)
    kept = of(EVERY_RULE)[0]
    for step, length in enumerate([*range(6), 9, 300, 301, 301, 700]):
        if step == 7:
            selector.forget(kept)
        kept.output_ids[len(kept.output_ids) :] = long[len(kept.output_ids) : length]
        row = rows(1, seed=step)
        found = under_rules(selector, counts, [kept], row)
        assert torch.equal(found[0], apply(EVERY_RULE, row[0], long[:length])), length
    selector.forget(kept)
    other = Request("other", [1], EVERY_RULE, 999, output_ids=[8, 8])
    found = under_rules(selector, counts, [other], row)
    assert torch.equal(found[0], penalized(EVERY_RULE, [1], [8, 8], EOS, row[0]))
    assert counts.num_held == 1


def test_a_slot_has_the_bias_of_the_request_that_holds_it() -> None:
    """A longer one before it, a shorter one, none; each after a preemption, too."""
    counts = TokenCounts(1, VOCAB, 999, CPU)
    selector = TokenSelector(EOS, counts)
    row = rows(1)
    for bias in ({i: float(i) for i in range(20)}, {3: 1.0, 19: -5.0}, {}):
        params = SamplingParams(logit_bias=bias, presence_penalty=0.5)
        for _ in range(2):
            request = of(params, output_ids=[4])[0]
            found = under_rules(selector, counts, [request], row)
            assert torch.equal(found[0], apply(params, row[0], [4])), bias
            selector.forget(request)


def test_a_step_counts_what_it_chose_before_the_host_knows_it() -> None:
    """Three steps ahead, one token read, one on the host's turn: as if all had been known."""
    counts = TokenCounts(2, VOCAB, 99, CPU)
    selector, feed = TokenSelector(EOS, counts), TokenFeed(4, counts)
    params = SamplingParams(frequency_penalty=2.0, repetition_penalty=1.2, min_new_tokens=2)
    requests = of(params, SamplingParams(), params.replace(repetition_penalty=0.5))
    known: list[list[int]] = [[], [], []]
    for step in range(8):
        logits = rows(3, seed=step) / 5
        draws = selector.draws(requests, counted=True)
        with torch.inference_mode():
            leave_tokens(logits, SamplingTensors.from_rows(draws, "cpu"), feed)
        tokens = feed.table[:3].tolist()
        for row, (request, ids) in enumerate(zip(requests, known, strict=True)):
            expected = penalized(request.params, PROMPT, ids, EOS, logits[row])
            assert tokens[row] == expected.argmax(), (step, row)
            ids.append(tokens[row])
            request.num_pending += 1
            if step != 3:  # else it is read one step later
                request.output_ids[:] = ids
                request.num_pending = 0
    assert len(set(known[0])) > 4


def test_a_slot_has_room_for_every_token_of_the_longest_answer() -> None:
    for most, dtype in ((8191, torch.int16), (8192, torch.int32)):
        assert count_dtype(most) == dtype
        counts = TokenCounts(1, VOCAB, most, CPU)
        request = Request("r", [4], SamplingParams(frequency_penalty=1.0), most, output_ids=[4] * (most - 1))
        TokenSelector(EOS, counts).draws([request], counted=True)
        assert counts.table.dtype == dtype
        assert counts.table[0, 4] // GENERATED == most - 1


def test_only_the_given_rows_change() -> None:
    counts = TokenCounts(3, VOCAB, 99, CPU)
    logits = rows(3)
    requests = of(SamplingParams(), EVERY_RULE, SamplingParams(), output_ids=[4, 4])
    found = under_rules(TokenSelector(EOS, counts), counts, requests, logits)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert not torch.equal(found[1], logits[1])
    assert torch.equal(logits, rows(3))


@pytest.mark.gpu
@pytest.mark.parametrize("most", [999, 9999])
def test_cuda_equals_cpu(most: int) -> None:
    counts = TokenCounts(2, VOCAB, most, torch.device("cuda"))
    selector, long = TokenSelector(EOS, counts), outputs(700)
    for step, length in enumerate([*range(6), 9, 300, 301, 301, 2, 700]):
        requests = of(EVERY_RULE, SamplingParams(), EVERY_RULE, output_ids=long[:length])
        if length == 2:
            for request in requests:
                selector.forget(request)
        logits = rows(3, seed=step)
        found = under_rules(selector, counts, requests, logits.cuda()).cpu()
        for row, request in enumerate(requests):
            assert torch.equal(found[row], apply(request.params, logits[row], long[:length])), (length, row)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_graph_serves_every_mix_of_rules(device: str) -> None:
    """Requests come, go and are read late; on a GPU all steps are replays of one capture."""
    vocab, size = 5003, 8
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else CPU
    logits = torch.zeros(size, vocab, dtype=torch.bfloat16, device=device)
    buffer = StepBuffer(size, size, 1, size, where)
    buffer.fill_padding()
    buffer.upload()
    feed, on_cpu = (TokenFeed(size, TokenCounts(size, vocab, 99, d)) for d in (where, CPU))
    draws = buffer.draws(size, (KINDS["logprobs"][0]._replace(top_k=vocab),))  # the twin sorts so many
    run = captured(lambda: leave_tokens(logits, draws, feed), device)
    selectors = [TokenSelector(EOS, one.counts) for one in (feed, on_cpu)]
    values = (
        EVERY_RULE.replace(logprobs=3),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, seed=3),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(min_new_tokens=2, logprobs=20),
        SamplingParams(frequency_penalty=2.0, temperature=0.3, seed=5),
    )
    live: list[Request] = []
    for step in range(24):
        live.append(Request(f"r{step}", PROMPT, values[step % len(values)], 999))
        if len(live) > size - (step % 3):
            for selector in selectors:
                selector.forget(live[0])
            del live[0]
        logits.copy_(torch.randn(size, vocab, generator=torch.Generator().manual_seed(step)) * 3)
        rows, others = (selector.draws(live, counted=True) for selector in selectors)
        buffer.fill(EMPTY, rows)
        buffer.upload()
        with torch.inference_mode():
            run()
            leave_tokens(logits[: len(live)].cpu(), SamplingTensors.from_rows(others, "cpu"), on_cpu)
        tokens = on_cpu.table[: len(live)].tolist()
        assert feed.table[: len(live)].tolist() == tokens, step
        if any(row.logprobs for row in rows):
            found = feed.logprobs[: len(live)].cpu()
            torch.testing.assert_close(found, on_cpu.logprobs[: len(live)], rtol=1e-6, atol=1e-6)
        for request, token in zip(live, tokens, strict=True):
            request.output_ids.append(token)
    assert on_cpu.counts.num_held == feed.counts.num_held > 3


def captured(call: Callable[[], None], device: str) -> Callable[[], None]:
    """What replays a call, or calls it where there are no graphs."""
    if device == "cpu":
        return call
    with torch.inference_mode():
        call()
        graph, _ = Recorder(torch.device("cuda", torch.cuda.current_device())).record(call)
    return graph.replay


@pytest.mark.parametrize(("penalizes", "counted"), [(True, [1, 7, 9]), (False, [1])])
def test_which_of_the_prompt_s_tokens_count(penalizes: bool, counted: list[int]) -> None:
    """Of a model whose original is given embeddings the first; a beam counts as its root does."""
    params = SamplingParams(num_beams=2, max_new_tokens=4)
    root = Request("r", [1, 7, 9], params, 8, penalizes_prompt=penalizes)
    beam = BeamGroup(root, frozenset())._child(root, 5)
    assert root.counted_ids == beam.counted_ids == counted
