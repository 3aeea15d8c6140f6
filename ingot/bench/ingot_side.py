"""Ingot as a side of a measurement.

Owns the room that an engine makes for a load, warming it up, and the arrival times of its streamed tokens.
Knows no measurement.

    IngotSide(SideSpec(path="engines/pocket-chat")).answer(asks, prompts)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.bench.load import Ask, PromptSource
from ingot.bench.memory import Memory, forget_peak, peak_bytes
from ingot.bench.run import Run
from ingot.bench.side import SideSpec
from ingot.bench.work import Work, read_bytes
from ingot.compare.engine import OpenEngine
from ingot.config.sampling import SamplingParams
from ingot.config.step_sizes import batch_buckets
from ingot.engine.manifest import is_engine
from ingot.errors import OutOfMemoryError
from ingot.llm import LLM

_WARM_UP_TOKENS = 3  # a prefill and two decode steps
_WARM_UP_SEED = -1  # other prompts than the measurement's
_MOST_CPU_CACHE = 1 << 30  # bytes, for a batch that the cache of an engine on a CPU does not hold


class IngotSide(OpenEngine):
    """An ``LLM`` whose requests are streamed."""

    def __init__(self, spec: SideSpec) -> None:
        runtime = spec.runtime(cache_tokens=spec.cache_tokens, batch_invariant=spec.batch_invariant)
        built = spec.path is not None and is_engine(Path(spec.path))
        size = spec.engine_batch_size if built else spec.max_batch_size
        super().__init__(spec, runtime, size, spec.random_weights)
        self.name = spec.title
        self._warm_up_s = 0.0
        executor, model = self.llm.executor, self.llm.engine.model
        self._runtime, self.max_batch_size = self.llm.runtime, executor.max_batch_size
        self.work = Work.of(model.config, read_bytes(model), executor.runner.caches[0].keys.dtype)

    def resize(self, batch: int) -> None:
        """A new KV cache for ``batch`` of the longest requests, over the same weights.

        Raises:
            OutOfMemoryError: it does not hold all of them at once.
        """
        self.max_batch_size = batch
        each = self._blocks(self.max_seq_len)
        self._reopen(batch * each)
        room = self.llm.executor.blocks.num_blocks // each
        if room < batch:
            raise OutOfMemoryError(
                "the KV cache does not hold the batch",
                seen=f"room for {room} of {batch} requests of {self.max_seq_len} tokens",
                fix="a smaller --batch, fewer tokens, or a larger GPU",
            )

    def make_room(self, requests: int, tokens: int) -> None:
        """A KV cache for so many requests of ``tokens`` at once, where a CPU took less unasked."""
        blocks = requests * self._blocks(tokens)
        unasked = self.device.type == "cpu" and self._runtime.cache_tokens is None
        if unasked and blocks > self.llm.executor.blocks.num_blocks:
            self._reopen(blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._runtime.block_size)

    def _block_bytes(self) -> int:
        executor = self.llm.executor
        return sum(cache.nbytes for cache in executor.runner.caches) // executor.blocks.num_blocks

    def _reopen(self, blocks: int) -> None:
        """Another KV cache over the same weights, unless the spec says how large: of so many blocks, on a CPU
        up to 1 GiB or one longest request.
        """
        engine, runtime = self.llm.engine, self._runtime
        if self.device.type == "cpu":
            blocks = max(min(blocks, _MOST_CPU_CACHE // self._block_bytes()), self._blocks(self.max_seq_len))
        limits = engine.manifest.build.replace(max_batch_size=self.max_batch_size)
        engine = dataclasses.replace(engine, manifest=engine.manifest.replace(build=limits))
        if runtime.cache_tokens is None:
            runtime = runtime.replace(cache_tokens=blocks * runtime.block_size)
        del self.llm
        forget_peak(self.device)
        self.llm = LLM.of_engine(engine, runtime)

    def memory(self) -> Memory:
        """Bytes of weights and cache, and the peak since the last ``resize``."""
        caches = self.llm.executor.runner.caches
        return Memory(
            weights=sum(p.nbytes for p in self.llm.engine.model.parameters()),
            cache=sum(c.nbytes for c in caches),
            peak=peak_bytes(self.device),
        )

    def warm_up(self, most: int) -> None:
        """Greedy graphs of all buckets up to ``most`` requests, prompts of many lengths, one generation."""
        start = time.perf_counter()
        buckets = (min(size, self.max_batch_size) for size in batch_buckets(most))
        self.llm.warm_up(sorted(set(buckets)), kinds=["greedy"])
        asks = [Ask(1, min(_WARM_UP_TOKENS, self.max_seq_len - 1))] * min(most, self.max_batch_size)
        self.answer(asks, PromptSource(self.vocab_size, _WARM_UP_SEED).prompts(asks))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """All prompts in flight together."""
        params = [SamplingParams(max_new_tokens=a.new_tokens, ignore_eos=True) for a in asks]
        arrivals: list[list[float]] = [[] for _ in asks]
        clock = time.perf_counter
        start = clock()
        for position, piece in self.llm.stream_many(prompts, params):
            now = clock()
            arrivals[position] += [now] * len(piece.token_ids)
        return Run.of(start, arrivals, clock())

    def facts(self) -> dict[str, Any]:
        """Start-up, memory and limits."""
        engine, executor = self.llm.engine, self.llm.executor
        found = super().facts() | {
            "plan_gpu": engine.plan.gpu,
            "kernels": executor.runner.forward.kernels(),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_batch_size": self.max_batch_size,
            "runtime": self.llm.runtime.to_json(),
            "weights_gb": round(sum(p.nbytes for p in engine.model.parameters()) / 1e9, 3),
            "kv_cache_gb": round(sum(c.nbytes for c in executor.runner.caches) / 1e9, 3),
            "preemptions": executor.num_preemptions,
        }
        if engine.device.type == "cuda":
            found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(engine.device) / 1e9, 3)
        return found
