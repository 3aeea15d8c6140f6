"""``tap("step.…")``: the rows of each step, and the mask of each layer as ranges."""

from __future__ import annotations

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import RequestError
from tests.tiny_models import random_ids, save_model, tiny_config

PROMPTS = [random_ids(12, seed=1), random_ids(5, seed=2)]
WINDOW, NEW = 7, 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("gemma2")
    save_model(tiny_config("gemma2", sliding_window=WINDOW), folder)  # layers 0 and 2 have the window
    return LLM(folder, "cpu", max_batch_size=2, runtime=RuntimeConfig(block_size=16))


def test_the_rows_of_a_prompt_and_its_masks(llm: LLM) -> None:
    ids = PROMPTS[0]
    with llm.tap("step.*", "step.visible.*") as seen:
        llm.logits(ids)
    names = {"step.input_ids", "step.positions", "step.query_start", "step.seq_lens"}
    assert set(seen) == names | {f"step.visible.{i}" for i in range(4)}
    assert seen["step.input_ids"].tolist() == ids
    assert seen["step.positions"].tolist() == list(range(12))
    assert seen["step.seq_lens"].tolist() == [12]
    assert seen["step.query_start"].tolist() == [0, 12]
    for layer in range(4):
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        if layer % 2 == 0:
            mask &= torch.ones(12, 12, dtype=torch.bool).triu(1 - WINDOW)
        ranges = [[min(row), max(row) + 1] for row in (line.nonzero().flatten().tolist() for line in mask)]
        assert seen[f"step.visible.{layer}"].tolist() == ranges


def test_steps_are_end_to_end_and_outputs_do_not_change(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    plain = [output.token_ids for output in llm.generate(PROMPTS, params)]
    with llm.tap("step.positions", "step.seq_lens", "step.query_start", "step.input_ids") as seen:
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == plain
    positions, starts = seen["step.positions"].tolist(), seen["step.query_start"].tolist()
    assert sorted(positions) == sorted([*range(12 + NEW - 1), *range(5 + NEW - 1)])
    assert starts.count(0) == NEW  # a step with both prompts, then decodes
    assert seen["step.seq_lens"].tolist()[-2:] == [12 + NEW - 1, 5 + NEW - 1]
    tokens = [id for prompt, answer in zip(PROMPTS, plain, strict=True) for id in (*prompt, *answer[:-1])]
    assert sorted(seen["step.input_ids"].tolist()) == sorted(tokens)


def test_modules_of_every_name_are_modules_alone(llm: LLM) -> None:
    with llm.tap("**") as seen:
        llm.logits(PROMPTS[1])
    assert not any(name.startswith("step.") for name in seen)


@pytest.mark.parametrize("pattern", ["step.mask", "step.visible.4", "step."])
def test_rows_that_a_step_does_not_have_are_refused(llm: LLM, pattern: str) -> None:
    with pytest.raises(RequestError, match=r"a step has no such rows.*step\.positions"), llm.tap(pattern):
        pass
