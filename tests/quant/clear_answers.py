"""Prompts whose greedy answers no rounding can change, by a model in fp32 of the same numbers.

Owns the reference and the drawing of such prompts. Where every logarithm of a probability is at most
``error`` from the reference's, the likeliest token is the same if it is ahead by more than twice that: so
tokens must be equal, and near ties neither fail a test nor have to be excused. Prompts on which rounding is
amplified are no measure of a kernel: plain PyTorch in the dtype must stay within half of ``error``.

    clear = ClearAnswers(folder, QuantConfig("w8a16"), "fp16", error=0.02)
    clear.check(llm, clear.answers(40), mean=0.006)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ingot import LLM, SamplingParams
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.engine_loader import engine_in_memory
from ingot.layers.linear import linears
from ingot.llm.outputs import Output
from tests.tiny_models import random_ids

NEW_TOKENS, LENGTHS = 6, 7
ROUNDS = 400  # draws of a prompt, at most


@dataclass(frozen=True)
class Answer:
    """A prompt, the reference's answer, and the logarithm of each token's probability."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def _run(llm: LLM, prompts: list[list[int]]) -> list[Output]:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    return llm.generate(prompts, params)


class ClearAnswers:
    """Of a checkpoint in a scheme, with floating-point values rounded to ``dtype``; arithmetic in fp32."""

    def __init__(self, folder: Path, quant: QuantConfig, dtype: str, error: float) -> None:
        engine = engine_in_memory(folder, torch.device("cpu"), dtype, quant=quant, max_batch_size=80)
        for linear in linears(engine.model).values():
            linear.widen()
        engine.model.float()
        engine.dtype = torch.float32
        self.error = error
        self._llm = LLM.of_engine(engine)
        self._rounded = LLM(folder, "cpu", quant=quant, compute_dtype=dtype, max_batch_size=80)
        self._found: list[Answer | None] = []

    def answers(self, count: int) -> list[Answer]:
        """The first ``count``, prompts of 1 to 7 tokens in turn; the same every time."""
        self._found += [None] * (count - len(self._found))
        for seed in range(ROUNDS):
            missing = [place for place in range(count) if self._found[place] is None]
            if not missing:
                break
            prompts = [random_ids(1 + n % LENGTHS, seed=n + 1000 * seed) for n in missing]
            outputs, rounded = (_run(llm, prompts) for llm in (self._llm, self._rounded))
            for place, prompt, output, near in zip(missing, prompts, outputs, rounded, strict=True):
                ahead = [one.top[0][1] - one.top[1][1] for one in output.logprobs]
                logprobs = [one.logprob for one in output.logprobs]
                moved = max(abs(a.logprob - b) for a, b in zip(near.logprobs, logprobs, strict=True))
                same = list(near.token_ids) == list(output.token_ids)
                if min(ahead) > 2 * self.error and same and moved <= self.error / 2:
                    self._found[place] = Answer(prompt, list(output.token_ids), logprobs)
        found = [answer for answer in self._found[:count] if answer is not None]
        assert len(found) == count, f"{count - len(found)} prompts without a clear answer"
        return found

    def check(self, llm: LLM, answers: list[Answer], mean: float, what: str = "") -> None:
        """The model gives these answers, each token within ``error`` of the reference, and ``mean`` on
        average.
        """
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        outputs = llm.generate([answer.prompt for answer in answers], params)
        apart = []
        for answer, output in zip(answers, outputs, strict=True):
            assert list(output.token_ids) == answer.tokens, (what, answer)
            for place, one in enumerate(output.logprobs):
                apart.append(abs(one.logprob - answer.logprobs[place]))
                assert apart[-1] <= self.error, (what, apart[-1], place, answer)
        assert sum(apart) / len(apart) < mean, what
