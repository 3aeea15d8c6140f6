"""The values of ``SamplingParams`` by name, as calls take them.

Covers their types for type checkers and editors; what they mean, ``SamplingParams`` says.

    def generate(self, prompt: str, **values: Unpack[SamplingValues]) -> Output: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from ingot.config.grammar_spec import Grammar
from ingot.config.transcript_rules import TranscriptRules


class SamplingValues(TypedDict, total=False):
    """Fields of ``SamplingParams``; ``max_tokens`` is another name for ``max_new_tokens``."""

    max_new_tokens: int | None
    max_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool
    logit_bias: Mapping[int, float] | None
    grammar: Grammar | None
    transcript: TranscriptRules | None
    logits_processors: Sequence[Callable[..., Any]]
