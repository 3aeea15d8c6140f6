"""Hugging Face's class as a side of a measurement.

Owns reading when its tokens arrive; requests run in padded batches, as its ``generate`` takes them. Knows no
measurement.

    HuggingFaceSide(SideSpec(kind="hf", path="checkpoint")).answer(asks, prompts)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ingot.bench.load import Ask, PromptSource
from ingot.bench.memory import Memory, forget_peak, peak_bytes
from ingot.bench.run import Run
from ingot.bench.side import SideSpec
from ingot.bench.work import Work, weight_bytes
from ingot.compare.huggingface import OpenClass


class HuggingFaceSide(OpenClass):
    """``AutoModelForCausalLM.generate``, greedy."""

    name = "huggingface"

    def __init__(self, spec: SideSpec) -> None:
        super().__init__(spec, spec.random_weights)
        self._warm_up_s = 0.0
        self.max_batch_size = spec.max_batch_size
        tables = [m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)]
        read = weight_bytes(self.model, [*tables], self.model.get_output_embeddings())
        self.work = Work.of(self.config, read, self.dtype)

    def resize(self, batch: int) -> None:
        """Padded batches of ``batch`` rows from now on."""
        forget_peak(self.device)
        self.max_batch_size = batch

    def make_room(self, requests: int, tokens: int) -> None:
        """Nothing: ``generate`` makes a cache for each batch."""

    def memory(self) -> Memory:
        """Bytes of weights, of the keys and values of a batch of the longest requests, and the peak since the
        last ``resize``.
        """
        return Memory(
            weights=sum(p.nbytes for p in self.model.parameters()),
            cache=self.max_batch_size * self.max_seq_len * self.work.kv_bytes,
            peak=peak_bytes(self.device),
        )

    def warm_up(self, most: int) -> None:
        """One short generation."""
        start = time.perf_counter()
        asks = [Ask(1, 2)] * min(most, self.max_batch_size)
        self.answer(asks, PromptSource(self.vocab_size, -1).prompts(asks))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """In batches of ``max_batch_size`` in order; a batch runs until its longest answer ends."""
        arrivals: list[list[float]] = []
        start = time.perf_counter()
        for first in range(0, len(asks), self.max_batch_size):
            part = slice(first, first + self.max_batch_size)
            most = max(a.new_tokens for a in asks[part])
            arrived = _Arrivals()
            self.complete(prompts[part], most, streamer=arrived)
            arrivals += [arrived.times[: a.new_tokens] for a in asks[part]]
        return Run.of(start, arrivals, time.perf_counter())

    def facts(self) -> dict[str, Any]:
        """Versions, start-up, memory."""
        found = super().facts()
        found |= {"warm_up_s": round(self._warm_up_s, 3), "max_batch_size": self.max_batch_size}
        if self.device.type == "cuda":
            found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(self.device) / 1e9, 3)
        return found


class _Arrivals:
    """A streamer that notes when ``generate`` hands over the tokens of a step; the first are the prompt."""

    def __init__(self) -> None:
        self._seen_prompt = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens, already on the host."""
        if self._seen_prompt:
            self.times.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is left to flush."""
