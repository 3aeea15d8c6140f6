"""The two sides of an evaluation, opened: Ingot and Hugging Face's class.

Owns their greedy answers, their logits, and what is told of them. Knows no metric.

    with open_side(SideSpec(path="engines/pocket-chat")) as side: side.logits(ids)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.measure.evaluate.eval_side import Generated, Side, SideSpec
from ingot.measure.side.huggingface import OpenClass, class_memory
from ingot.measure.side.model_spec import HUGGINGFACE, longest
from ingot.measure.side.opened_engine import OpenEngine
from ingot.runtime.likelihood import target_logprobs


def open_side(spec: SideSpec) -> AbstractContextManager[Side]:
    """Load what the spec names; leaving the block frees it.

    Raises:
        IngotError: it cannot be loaded.
    """
    return closing(HuggingFaceSide(spec) if spec.kind == HUGGINGFACE else IngotSide(spec))


class IngotSide(OpenEngine):
    """An ``LLM``: all prompts in flight together."""

    def __init__(self, spec: SideSpec) -> None:
        runtime = spec.runtime()
        if spec.small_cache:
            runtime = runtime.replace(cache_tokens=longest(spec) + runtime.block_size)
        super().__init__(spec, runtime)

    def warm_up(self) -> None:
        """Greedy decode graphs and kernels, on a GPU."""
        self.llm.warm_up(kinds=["greedy"])

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
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
        return self.llm.log_likelihood(ids)

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.llm.logits(ids)

    def facts(self) -> dict[str, Any]:
        own = {"device": str(self.device), "kv_dtype": self.llm.runtime.kv_dtype}
        return super().facts() | own


class HuggingFaceSide(OpenClass):
    """Answers in padded batches of the spec's size, in order; a batch runs until its longest answer ends.
    Stop strings are whoever reads the text's to cut at.
    """

    def __init__(self, spec: SideSpec) -> None:
        super().__init__(spec)
        self._batch = spec.batch

    def warm_up(self) -> None:
        list(self.generate([[0]], 2, [], []))

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        for first in range(0, len(prompts), self._batch):
            part = prompts[first : first + self._batch]
            most = min(new_tokens, self.max_seq_len - max(map(len, part)))
            with class_memory("--against-batch"):
                out = self.complete(part, most, eos_token_id=list(stop_ids) or None)
            for row, tokens in enumerate(out.tolist()):
                end = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
                yield Generated(first + row, tokens[:end], "length" if end is None else "stop")

    @torch.inference_mode()
    def log_likelihood(self, ids: list[int]) -> torch.Tensor:
        targets = torch.tensor(ids[1:], dtype=torch.int64, device=self.device)
        return target_logprobs(self._logits(ids)[:-1], targets).cpu()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self._logits(ids).float().cpu()

    def facts(self) -> dict[str, Any]:
        own = {"device": str(self.device), "max_seq_len": self.max_seq_len, "batch": self._batch}
        return super().facts() | own

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in the model's dtype, on its device."""
        with class_memory("--window"):
            out = self.model(torch.tensor([ids], device=self.device), use_cache=False)
        logits: torch.Tensor = out.logits
        return logits[0]
