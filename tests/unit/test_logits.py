"""Each decoding rule against Hugging Face's processor or its definition, and state against a fresh start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from ingot.config.sampling import SamplingParams
from ingot.runtime.logits import processors_for

VOCAB = 61
PROMPT = [3, 7, 7, 60, 0]
EOS = frozenset({2, 5})
EVERY_RULE = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.3, min_new_tokens=4
)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, VOCAB, generator=generator) * 5


def outputs(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def apply(params: SamplingParams, logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
    result = logits.clone()
    for processor in processors_for(params, PROMPT, EOS, VOCAB, "cpu"):
        processor(result, output_ids)
    return result


def test_defaults_need_no_processor() -> None:
    assert processors_for(SamplingParams(), PROMPT, EOS, VOCAB, "cpu") == []
    no_end = SamplingParams(min_new_tokens=3, ignore_eos=True)
    assert processors_for(no_end, PROMPT, EOS, VOCAB, "cpu") == []


def test_every_rule_has_one_processor() -> None:
    assert len(processors_for(EVERY_RULE, PROMPT, EOS, VOCAB, "cpu")) == 3
    assert len(processors_for(SamplingParams(frequency_penalty=0.1), PROMPT, EOS, VOCAB, "cpu")) == 1


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
    strange = row.clone()
    for processor in processors_for(params, [*PROMPT, -1, VOCAB + 100], EOS, VOCAB, "cpu"):
        processor(strange, [4, VOCAB])
    assert torch.equal(strange, apply(EVERY_RULE, row, [4, VOCAB]))


def histories() -> list[list[int]]:
    """Growth by one, by many, a preemption that shortens, another history of the same length, and growth."""
    long = outputs(700)
    other = [(t + 1) % VOCAB for t in long[:300]]
    growing = [long[:n] for n in [*range(6), 9, 300, 301, 301]]
    return [*growing, long[:2], long[:3], other, [*other, 8], [*other, 8, 8], [], long]


def test_kept_state_equals_a_fresh_start() -> None:
    kept = processors_for(EVERY_RULE, PROMPT, EOS, VOCAB, "cpu")
    for step, output_ids in enumerate(histories()):
        row = rows(1, seed=step)[0]
        expected = apply(EVERY_RULE, row, output_ids)
        for processor in kept:
            processor(row, output_ids)
        assert torch.equal(row, expected), f"history {step}"


def test_many_distinct_tokens_outgrow_the_first_buffer() -> None:
    vocab = 1000
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=2.0)
    kept = processors_for(params, [0], EOS, vocab, "cpu")
    for length in range(600):
        row = torch.ones(vocab)
        for processor in kept:
            processor(row, range(1, 1 + length))
        expected = torch.ones(vocab)
        expected[: 1 + length] = 0.5
        expected[1 : 1 + length] -= 0.5
        assert torch.equal(row, expected), length


def test_only_the_given_row_changes() -> None:
    logits = rows(3)
    before = logits.clone()
    for processor in processors_for(EVERY_RULE, PROMPT, EOS, VOCAB, "cpu"):
        processor(logits[1], [4, 4])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[1], before[1])


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    kept = processors_for(EVERY_RULE, PROMPT, EOS, VOCAB, "cuda")
    for step, output_ids in enumerate(histories()):
        row = rows(1, seed=step)[0]
        on_device = row.cuda()
        for processor in kept:
            processor(on_device, output_ids)
        torch.testing.assert_close(on_device.cpu(), apply(EVERY_RULE, row, output_ids), rtol=1e-6, atol=1e-6)
