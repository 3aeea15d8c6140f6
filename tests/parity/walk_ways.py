"""One step of a model by every way that should agree: its walk, repeated, without early starts; its modules.

Owns the replay: every way begins with the same cache, and the tokens go on as the modules say, so that no
step carries another's differences along; and a walk that is led (led_walk.py) goes on after a tie as they do,
so that no layer does. Knows no scheme.

    with by_every_way(llm, lead=True) as steps:
        llm.generate(prompts, params)
    expect_one_result(steps)
    expect_near(steps)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.layers.decoder_forward import Operations
from ingot.layers.forward_batch import ForwardBatch
from ingot.llm.outputs import Output
from ingot.runtime.step.chosen_products import Forward
from tests.parity.led_walk import Lead

REPEATS = 3
NEAR = 1e-4  # nats, of two ways in fp32


@dataclass(frozen=True)
class Step:
    """Logits [L, vocab_size] of one step.

    Attributes:
        decodes: whether every request had one token.
        walks: of the walk, several times.
        alone: of the walk without early starts.
        modules: module by module.
        led: of the walk that is led, where that is wanted.
    """

    decodes: bool
    walks: list[torch.Tensor]
    alone: list[torch.Tensor]
    modules: torch.Tensor
    led: torch.Tensor | None = None


@contextmanager
def early_starts(wanted: bool) -> Iterator[None]:
    """With ``wanted`` False no kernel begins before the one before it has ended; else as ever."""
    asking = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("ingot.")
        and name != "ingot.kernels.launch_overlap"
        and hasattr(module, "overlaps")
    ]
    assert asking
    with pytest.MonkeyPatch.context() as patch:
        for module in () if wanted else asking:
            patch.setattr(module, "overlaps", lambda device: False)
        yield


@contextmanager
def by_every_way(
    llm: LLM,
    repeats: int = REPEATS,
    choose: Callable[[bool], None] = lambda walk: None,
    *,
    lead: bool = False,
) -> Iterator[list[Step]]:
    """Steps that the model computes meanwhile, without graphs.

    Args:
        repeats: runs of the walk; without early starts one less.
        choose: called before a way runs, with whether it is the walk.
        lead: run the walk once more, led; of models in fp32.
    """
    own, steps, call = llm.executor.runner.forward, [], Forward.__call__

    def every(self: Forward, batch: ForwardBatch) -> torch.Tensor:
        if self is not own:
            return call(self, batch)
        kept = _caches(self)

        def way(walk: bool, early: bool = True) -> torch.Tensor:
            _restore(self, kept)
            self.fused = walk
            choose(walk)
            with nullcontext() if early else early_starts(False):
                return call(self, batch).clone()

        walks = [way(True) for _ in range(repeats)]
        alone = [way(True, False) for _ in range(repeats - 1)]
        modules, led = way(False), None
        if lead:
            after, leader = _caches(self), Lead()
            with leader.recorded():
                assert torch.equal(way(False), modules)
            with leader.followed():
                led = way(True)
            _restore(self, after)
        steps.append(Step(batch.max_query_len == 1, walks, alone, modules, led))
        return modules

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "__call__", every)
        patch.setattr(own, "fused", own.fused)
        yield steps


def _caches(forward: Forward) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in cache.tensors] for cache in forward.caches]


def _restore(forward: Forward, kept: list[list[torch.Tensor]]) -> None:
    for cache, tensors in zip(forward.caches, kept, strict=True):
        for tensor, before in zip(cache.tensors, tensors, strict=True):
            tensor.copy_(before)


def expect_one_result(steps: Sequence[Step]) -> None:
    """Raise unless the walk gave the same bits each time: a race would move some."""
    assert {step.decodes for step in steps} == {True, False}
    for step in steps:
        for logits in (*step.walks, *step.alone):
            assert torch.equal(logits, step.walks[0])


def expect_near(steps: Sequence[Step]) -> None:
    """Raise unless the led walk and the modules, both in fp32, agree: every row of logits to NEAR, with the
    same best token but for a tie.
    """
    for step in steps:
        assert step.led is not None
        led, modules = (rows.float().log_softmax(-1) for rows in (step.led, step.modules))
        away = (led - modules).abs().amax(dim=-1)
        assert bool((away <= NEAR).all()), away.sort().values[-8:]  # so that NaN fails
        best = modules.gather(-1, led.argmax(-1, keepdim=True))[:, 0]
        assert bool((modules.amax(-1) - best <= 2 * NEAR).all())


def count_steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Tokens of each step that fused operations computed: those in which all decode, and others."""
    seen: dict[str, list[int]] = {"decodes": [], "others": []}
    original = Operations.logits

    def counted(self: Operations, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        if self.step.fused:
            seen["decodes" if self.step.decodes else "others"].append(hidden.shape[0])
        return original(self, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Operations, "logits", counted)
    return seen


def expect_same(plain: Sequence[Output], walked: Sequence[Output], near: float = 0.02) -> None:
    """Raise unless tokens are the same and their logarithms near."""
    for one, other in zip(plain, walked, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            pair = torch.tensor([v for _, v in a.top]), torch.tensor([v for _, v in b.top])
            assert torch.allclose(*pair, rtol=0, atol=near)


Found = list[tuple[list[int], list[float]]]


def found_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Found:
    """Tokens, and logarithms of their probabilities, of each prompt."""
    outputs = llm.generate(prompts, params)
    return [(out.token_ids, [entry.logprob for entry in out.logprobs or ()]) for out in outputs]


def expect_graphs_agree(make: Callable[[], LLM], prompts: list[list[int]], params: SamplingParams) -> Found:
    """What captured steps give, the same each time and without early starts, or raise.

    Between replayed kernels nothing waits for a host, so that an early one meets the one before at its work.

    Args:
        make: a model with graphs, that shares no beginnings of prompts.
    """
    found = []
    for early in (True, False):
        with early_starts(early):
            llm = make()
            found += [found_of(llm, prompts, params) for _ in range(REPEATS if early else 1)]
    assert all(each == found[0] for each in found[1:])
    return found[0]


def expect_equal(found: Found, expected: Found) -> None:
    """Raise unless all tokens are as expected, and their logarithms to NEAR."""
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(other[1]), rtol=0, atol=NEAR)
