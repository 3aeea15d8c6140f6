"""A record of the steps that a runner was given.
with watch(llm) as steps: llm.generate(...)
assert steps.chunks > 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from ingot import LLM
from ingot.runtime.sampling.pending_tokens import TokensInFlight
from ingot.runtime.sampling.sampler import RowSampling
from ingot.runtime.scheduling.scheduled_batch import Layers, ScheduledBatch


@dataclass
class Share:
    """One request's part of a step, as it was when the step ran."""

    request_id: str
    start: int
    count: int
    samples: bool


@dataclass
class Steps:
    """The steps so far, the layers behind them, how many steps were sent ahead, and how many requests were
    preempted for them.
    """

    steps: list[list[Share]] = field(default_factory=list)
    layers: list[Layers] = field(default_factory=list)
    ahead: int = 0
    preemptions: int = 0

    @property
    def chunks(self) -> int:
        """Shares that did not reach their request's last token."""
        return sum(not share.samples for step in self.steps for share in step)

    @property
    def layered(self) -> int:
        """Chunks that were computed a few layers per step, all of them."""
        return sum(one.ends and one.first > 0 for one in self.layers)

    @property
    def largest_batch(self) -> int:
        """Most requests in one step."""
        return max(len(step) for step in self.steps)

    @property
    def first_starts(self) -> dict[str, int]:
        """Where each request's first computed token was: beyond 0, its beginning came from the cache."""
        starts: dict[str, int] = {}
        for step in self.steps:
            for share in step:
                starts.setdefault(share.request_id, share.start)
        return starts

    @property
    def restarts(self) -> list[int]:
        """Where requests that were preempted went on."""
        reached: dict[str, int] = {}
        found = []
        for step in self.steps:
            for share in step:
                if share.start < reached.get(share.request_id, 0):
                    found.append(share.start)
                reached[share.request_id] = share.start + share.count
        return found


@contextmanager
def watch(llm: LLM) -> Iterator[Steps]:
    """Record the steps of an LLM while the block runs."""
    seen, runner, before = Steps(), llm.executor.runner, llm.executor.num_preemptions
    run, launch, run_behind = runner.run, runner.launch, runner.run_behind

    def record(step: ScheduledBatch) -> None:
        shares = [(i.request.request_id, i.start, i.count, i.samples) for i in step.requests]
        seen.steps.append([Share(*values) for values in shares])
        seen.layers += [] if step.layers is None else [step.layers]

    def recorded_run(step: ScheduledBatch) -> torch.Tensor:
        record(step)
        return run(step)

    def recorded_launch(step: ScheduledBatch, draws: Sequence[RowSampling]) -> TokensInFlight:
        record(step)
        seen.ahead += 1
        return launch(step, draws)

    def recorded_layers(step: ScheduledBatch) -> None:
        record(step)
        run_behind(step)

    runner.run, runner.launch = recorded_run, recorded_launch  # type: ignore[method-assign]
    runner.run_behind = recorded_layers  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        runner.run, runner.launch = run, launch  # type: ignore[method-assign]
        runner.run_behind = run_behind  # type: ignore[method-assign]
        seen.preemptions = llm.executor.num_preemptions - before


def before_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[ScheduledBatch], object]) -> None:
    """``act(step)`` comes before every step that is not sent ahead."""
    run = llm.executor.runner.run

    def acting(step: ScheduledBatch) -> torch.Tensor:
        act(step)
        return run(step)

    monkeypatch.setattr(llm.executor.runner, "run", acting)


def check_idle(llm: LLM) -> None:
    """Nothing is in flight and every block is free."""
    executor = llm.executor
    assert not executor.has_work
    assert executor.blocks.num_free == executor.blocks.num_blocks
    held = (executor.runner.feed.counts.num_held, executor.masks.num_held, executor._held_to_grammars)
    assert not any((executor._owner, executor._groups, executor._reading, *held))
