"""Requests of many lengths and kinds, and each one's answer alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot import LLM, SamplingParams
from ingot.llm import Output
from tests.tiny_models import random_ids

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=1.0, top_p=0.95, seed=11)
PENALISED = SAMPLED.replace(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, top_k=40)
TOLD = GREEDY.replace(repetition_penalty=1.05, min_new_tokens=9, logprobs=5)
PROMPTS = [random_ids(length, seed=length) for length in (1, 5, 9, 16, 17, 33, 40, 23)]
TEXTS = ("I dream of", "", "A whisper", "The light in my circuits")
MIXED = [GREEDY, SAMPLED, PENALISED, GREEDY.replace(max_new_tokens=3), SAMPLED.replace(n=3)]
Make = Callable[..., LLM]
_alone: dict[tuple[LLM, tuple[int, ...], str], list[list[int]]] = {}  # by the parameters' text


def ids_of(outputs: Sequence[Output]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.answers] for output in outputs]


def alone(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[list[int]]]:
    """Each prompt by itself; of an engine that several tests have, once."""
    keys = [(llm, tuple(p), repr(v)) for p, v in zip(prompts, params, strict=True)]
    for key, prompt, values in zip(keys, prompts, params, strict=True):
        if key not in _alone:
            _alone[key] = ids_of(llm.generate(prompt, values))[0]
    return [_alone[key] for key in keys]


def mixed_params(count: int) -> list[SamplingParams]:
    return [MIXED[i % len(MIXED)] for i in range(count)]
