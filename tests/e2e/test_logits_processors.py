"""A request's logits processors: Hugging Face's own, and their effect on other requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from ingot import LLM, SamplingParams
from ingot.errors import RequestError
from tests.tiny_models import random_ids, save_model, tiny_config

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def no_repeats(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = NoRepeatNGramLogitsProcessor(2)(torch.tensor([ids]), logits[None])
    return scores[0]


def test_a_processor_of_hugging_face_gives_its_tokens_beside_plain_requests(tmp_path: Path) -> None:
    model = save_model(tiny_config("llama"), tmp_path, seed=3)
    llm, ids = LLM(tmp_path, "cpu", max_batch_size=4), random_ids(9, seed=1)
    plain = llm.generate(ids, GREEDY)[0].token_ids
    brought = GREEDY.replace(logits_processors=[no_repeats])
    outputs = llm.generate([ids] * 3, [GREEDY, brought, GREEDY])
    theirs = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=24,
        do_sample=False,
        no_repeat_ngram_size=2,
        pad_token_id=0,
    )
    assert outputs[1].token_ids == theirs[0, len(ids) :].tolist() != plain
    assert outputs[0].token_ids == outputs[2].token_ids == plain
    assert llm.generate(ids, GREEDY, logits_processors=[no_repeats])[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize("beams", [1, 2])
def test_a_processor_that_fails_ends_its_own_call(tmp_path: Path, beams: int) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm, ids = LLM(tmp_path, "cpu", max_batch_size=4), random_ids(9, seed=1)
    plain = llm.generate(ids, GREEDY)[0].token_ids

    def failing(given: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(given) > len(ids) + 2:
            raise ValueError("enough")
        return logits

    other = llm.stream(ids, GREEDY)
    tokens = [*next(other).token_ids]
    with pytest.raises(RequestError, match="failing failed; seen: ValueError"):
        llm.generate(ids, GREEDY, num_beams=beams, logits_processors=[failing])
    tokens += [token for piece in other for token in piece.token_ids]
    assert tokens == plain
    assert not llm.executor.has_work
    assert llm.executor.blocks.num_free == llm.executor.blocks.num_blocks
