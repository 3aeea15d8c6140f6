"""Ingot as a side of an evaluation.

Owns its requests and what is told of them. Knows no metric.

    IngotSide(SideSpec(path="engines/pocket-chat")).logits(ids)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ingot.compare.engine import OpenEngine
from ingot.compare.spec import longest
from ingot.config.sampling import SamplingParams
from ingot.engine.text import TextParts
from ingot.evaluate.side import Generated, SideSpec


class IngotSide(OpenEngine):
    """An ``LLM``: all prompts in flight together."""

    def __init__(self, spec: SideSpec) -> None:
        runtime = spec.runtime()
        if spec.small_cache:
            runtime = runtime.replace(cache_tokens=longest(spec) + runtime.block_size)
        super().__init__(spec, runtime)

    @property
    def text(self) -> TextParts:
        """Tokenizer, chat format and end tokens."""
        return self.llm.engine.text

    def warm_up(self) -> None:
        """Greedy decode graphs and kernels, on a GPU."""
        self.llm.warm_up(kinds=["greedy"])

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """As they end."""
        params = SamplingParams(
            max_new_tokens=new_tokens,
            stop=tuple(stops) if self.llm.tokenizer is not None else (),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=True,
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        for position, piece in self.llm.stream_many(list(prompts), params):
            tokens[position] += piece.token_ids
            if piece.finish_reason is not None:
                yield Generated(position, tokens[position], piece.finish_reason)

    def log_likelihood(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens - 1]."""
        return self.llm.log_likelihood(ids)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens, vocab_size]."""
        return self.llm.logits(ids)

    def facts(self) -> dict[str, Any]:
        """Architecture, dtypes, limits."""
        own = {"device": str(self.device), "kv_dtype": self.llm.runtime.kv_dtype}
        return super().facts() | own
