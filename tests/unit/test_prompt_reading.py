"""Prompts that are scored, not answered: what is kept, chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.likelihood import PromptReading
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from tests.unit.fake_executor import check_empty, fake_executor


def test_a_prompt_that_is_read_again_has_each_token_once() -> None:
    """It was preempted: what came of its first chunks goes, hidden states and scores alike."""
    reading = PromptReading(lambda values, start: values + start)
    chunks = [(torch.zeros(2, 1), 0), (torch.zeros(1, 1), 2)]
    for values, start in (chunks[0], *chunks):
        reading.add(values, start, torch.full((len(values), 1, 4), float(start)))
    assert reading.kept.flatten().tolist() == [0, 0, 2]
    assert reading.scores[:, 0, 0].tolist() == [0, 0, 2]


def test_a_prompt_that_is_embedded_is_not_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hidden states are the host's to keep, also beside requests whose steps are sent ahead."""
    executor, runner = fake_executor(run_ahead=True, token_budget=4)

    def run_reading(step: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        places = [i for item in step.requests for i in range(item.start, item.start + item.count)]
        return runner.run(step), torch.tensor(places)[:, None], {}

    monkeypatch.setattr(runner, "run_reading", run_reading, raising=False)
    executor.add("r", [1, 2], SamplingParams(max_new_tokens=12))
    for _ in range(3):
        executor.step()
    executor.add_reading("h", [3, 4, 5, 6, 7], lambda hidden, start: hidden, hidden=True)
    while "h" in executor.active_ids():
        executor.step()
    assert executor.take_reading("h").kept.flatten().tolist() == [0, 1, 2, 3, 4]
    while executor.has_work:
        executor.step()
    assert runner.ahead
    check_empty(executor)
