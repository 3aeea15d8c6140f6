"""Ingot as a side of an evaluation.

Owns opening an engine or checkpoint for it. Knows no metric.

    IngotSide(SideSpec(path="engines/pocket-chat")).logits(ids)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ingot.config.runtime import RuntimeConfig
from ingot.config.sampling import SamplingParams
from ingot.device import dtype_name
from ingot.engine.text import TextParts
from ingot.evaluate.side import Generated, SideSpec, longest
from ingot.llm import LLM


class IngotSide:
    """An ``LLM``: all prompts in flight together."""

    def __init__(self, spec: SideSpec) -> None:
        start = time.perf_counter()
        self._llm = _open(spec)
        self._load_s = time.perf_counter() - start
        self.max_seq_len = self._llm.executor.max_seq_len
        self.vocab_size = self._llm.engine.model.config.vocab_size

    @property
    def text(self) -> TextParts:
        """Tokenizer, chat format and end tokens."""
        return self._llm.engine.text

    def warm_up(self) -> None:
        """Greedy decode graphs and kernels, on a GPU."""
        self._llm.warm_up(kinds=["greedy"])

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """As they end."""
        params = SamplingParams(
            max_new_tokens=new_tokens,
            stop=tuple(stops) if self._llm.tokenizer is not None else (),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=True,
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        for position, piece in self._llm.stream_many(list(prompts), params):
            tokens[position] += piece.token_ids
            if piece.finish_reason is not None:
                yield Generated(position, tokens[position], piece.finish_reason)

    def log_likelihood(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens - 1]."""
        return self._llm.log_likelihood(ids)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens, vocab_size]."""
        return self._llm.logits(ids)

    def facts(self) -> dict[str, Any]:
        """Architecture, dtypes, limits."""
        engine = self._llm.engine
        return {
            "architecture": engine.manifest.model.architecture,
            "parameters": sum(p.numel() for p in engine.model.parameters()),
            "dtype": dtype_name(engine.dtype),
            "device": str(engine.device),
            "quantization": engine.manifest.quant.label,
            "kv_dtype": self._llm.runtime.kv_dtype,
            "max_seq_len": self.max_seq_len,
            "load_s": round(self._load_s, 3),
        }

    def close(self) -> None:
        """Free weights and cache, on a GPU to the last byte, for the side after this one."""
        del self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _open(spec: SideSpec) -> LLM:
    asked = {"memory_fraction": spec.memory_fraction, "token_budget": spec.token_budget}
    asked = {name: value for name, value in asked.items() if value is not None}
    runtime = RuntimeConfig().replace(kv_dtype=spec.kv_dtype, **asked)
    if spec.small_cache:
        runtime = runtime.replace(cache_tokens=longest(spec) + runtime.block_size)
    quant = None if spec.quant == "none" else spec.quant
    return LLM(
        spec.path,
        spec.device,
        compute_dtype=spec.dtype,
        runtime=runtime,
        max_seq_len=spec.max_seq_len,
        quant=quant,
    )
