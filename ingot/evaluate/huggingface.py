"""Hugging Face's class as a side of an evaluation.

Owns its answers in padded batches, and its logits. Knows no metric.

    HuggingFaceSide(SideSpec(path="checkpoint", kind="hf")).logits(ids)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ingot.compare.huggingface import OpenClass, class_memory
from ingot.evaluate.side import Generated, SideSpec
from ingot.runtime.likelihood import target_logprobs


class HuggingFaceSide(OpenClass):
    """Answers in padded batches of the spec's size."""

    def __init__(self, spec: SideSpec) -> None:
        super().__init__(spec)
        self._batch = spec.batch

    def warm_up(self) -> None:
        """One short generation."""
        list(self.generate([[0]], 2, [], []))

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """In padded batches, in order; a batch runs until its longest answer ends. Stop strings are whoever
        reads the text's to cut at.
        """
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
        """Float32 [num_tokens - 1]."""
        targets = torch.tensor(ids[1:], dtype=torch.int64, device=self.device)
        return target_logprobs(self._logits(ids)[:-1], targets).cpu()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens, vocab_size]."""
        return self._logits(ids).float().cpu()

    def facts(self) -> dict[str, Any]:
        """Class, versions, dtype, limits."""
        own = {"device": str(self.device), "max_seq_len": self.max_seq_len, "batch": self._batch}
        return super().facts() | own

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in the model's dtype, on its device."""
        with class_memory("--window"):
            out = self.model(torch.tensor([ids], device=self.device), use_cache=False)
        logits: torch.Tensor = out.logits
        return logits[0]
