"""The two sides of a measurement, opened: Ingot and Hugging Face's class.

Owns the room that a load gets, the warm-up, and when tokens arrive. Knows no measurement.

    open_side(SideSpec(path="engines/pocket-chat")).answer(asks, prompts)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.config.step_sizes import batch_buckets
from ingot.engine.manifest import is_engine
from ingot.errors import OutOfMemoryError
from ingot.llm import LLM
from ingot.measure.bench.bench_side import Side, SideSpec
from ingot.measure.side.huggingface import OpenClass
from ingot.measure.side.machine import Memory, forget_peak, peak_bytes
from ingot.measure.side.model_spec import HUGGINGFACE
from ingot.measure.side.opened_engine import OpenEngine
from ingot.measure.side.step_work import Work, read_bytes, weight_bytes
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask, PromptSource

_WARM_UP_TOKENS = 3  # a prefill and two decode steps
_WARM_UP_SEED = -1  # other prompts than the measurement's
_MOST_CPU_CACHE = 1 << 30  # bytes, for a batch that the cache of an engine on a CPU does not hold


def open_side(spec: SideSpec) -> Side:
    """Load what the spec names.

    Raises:
        IngotError: it cannot be loaded, or transformers is missing.
    """
    return HuggingFaceSide(spec) if spec.kind == HUGGINGFACE else IngotSide(spec)


class IngotSide(OpenEngine):
    """An ``LLM`` whose requests are streamed, all in flight together."""

    def __init__(self, spec: SideSpec) -> None:
        runtime = spec.runtime(
            cache_tokens=spec.cache_tokens,
            batch_invariant=spec.batch_invariant,
            prefix_reuse=spec.prefix_reuse,
        )
        built = spec.path is not None and is_engine(Path(spec.path))
        size = spec.engine_batch_size if built else spec.max_batch_size
        super().__init__(spec, runtime, size, spec.random_weights)
        self.name = spec.title
        self._warm_up_s = 0.0
        executor, model = self.llm.executor, self.llm.engine.model
        self._runtime, self.max_batch_size = self.llm.runtime, executor.max_batch_size
        self.work = Work.of(model.config, read_bytes(model), executor.runner.caches[0].keys.dtype)

    def resize(self, batch: int) -> None:
        """A new KV cache over the same weights."""
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
        """A larger KV cache, where a CPU took less unasked."""
        blocks = requests * self._blocks(tokens)
        unasked = self.device.type == "cpu" and self._runtime.cache_tokens is None
        if unasked and blocks > self.llm.executor.blocks.num_blocks:
            self._reopen(blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._runtime.block_size)

    def _reopen(self, blocks: int) -> None:
        """Another KV cache over the same weights, unless the spec says how large: of so many blocks, on a CPU
        up to 1 GiB or one longest request.
        """
        engine, runtime = self.llm.engine, self._runtime
        if self.device.type == "cpu":
            block_bytes = self._cache_bytes() // self.llm.executor.blocks.num_blocks
            blocks = max(min(blocks, _MOST_CPU_CACHE // block_bytes), self._blocks(self.max_seq_len))
        limits = engine.manifest.build.replace(max_batch_size=self.max_batch_size)
        engine = dataclasses.replace(engine, manifest=engine.manifest.replace(build=limits))
        if runtime.cache_tokens is None:
            runtime = runtime.replace(cache_tokens=blocks * runtime.block_size)
        del self.llm
        forget_peak(self.device)
        self.llm = LLM.of_engine(engine, runtime)

    def memory(self) -> Memory:
        return Memory(_bytes(self.llm.engine.model), self._cache_bytes(), peak_bytes(self.device))

    def _cache_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.llm.executor.runner.caches)

    def warm_up(self, most: int) -> None:
        """Greedy graphs of all buckets up to ``most`` requests, prompts of many lengths, one generation."""
        start = time.perf_counter()
        buckets = (min(size, self.max_batch_size) for size in batch_buckets(most))
        self.llm.warm_up(sorted(set(buckets)), kinds=["greedy"])
        _generate(self, most, min(_WARM_UP_TOKENS, self.max_seq_len - 1))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        params = [SamplingParams(max_new_tokens=a.new_tokens, ignore_eos=True) for a in asks]
        arrivals: list[list[float]] = [[] for _ in asks]
        token_ids: list[list[int]] = [[] for _ in asks]
        clock = time.perf_counter
        start = clock()
        for position, piece in self.llm.stream_many(prompts, params):
            now = clock()
            arrivals[position] += [now] * len(piece.token_ids)
            token_ids[position] += piece.token_ids
        return Run.of(start, arrivals, clock(), token_ids)

    def facts(self) -> dict[str, Any]:
        engine, executor = self.llm.engine, self.llm.executor
        return {
            **super().facts(),
            "plan_gpu": engine.plan.gpu,
            "kernels": executor.runner.forward.kernels(),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_batch_size": self.max_batch_size,
            "runtime": self.llm.runtime.to_json(),
            "weights_gb": round(_bytes(engine.model) / 1e9, 3),
            "kv_cache_gb": round(self._cache_bytes() / 1e9, 3),
            "preemptions": executor.num_preemptions,
            **_gpu_peak(self.device),
        }


class HuggingFaceSide(OpenClass):
    """``AutoModelForCausalLM.generate``, greedy, in padded batches."""

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
        """Its cache is that of a batch of the longest requests."""
        cache = self.max_batch_size * self.max_seq_len * self.work.kv_bytes
        return Memory(_bytes(self.model), cache, peak_bytes(self.device))

    def warm_up(self, most: int) -> None:
        start = time.perf_counter()
        _generate(self, most, 2)
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """In batches of ``max_batch_size`` in order; a batch runs until its longest answer ends."""
        arrivals: list[list[float]] = []
        token_ids: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(asks), self.max_batch_size):
            part = slice(first, first + self.max_batch_size)
            arrived = _Arrivals()
            done = self.complete(prompts[part], max(a.new_tokens for a in asks[part]), streamer=arrived)
            arrivals += [arrived.times[: a.new_tokens] for a in asks[part]]
            rows = zip(done.tolist(), asks[part], strict=True)
            token_ids += [row[: a.new_tokens] for row, a in rows]
        return Run.of(start, arrivals, time.perf_counter(), token_ids)

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_batch_size": self.max_batch_size,
            **_gpu_peak(self.device),
        }


class _Arrivals:
    """A streamer that notes when ``generate`` hands over the tokens of a step; the first are the prompt."""

    def __init__(self) -> None:
        self._seen_prompt = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.times.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None: ...


def _generate(side: Side, most: int, new_tokens: int) -> None:
    asks = [Ask(1, new_tokens)] * min(most, side.max_batch_size)
    side.answer(asks, PromptSource(side.vocab_size, _WARM_UP_SEED).prompts(asks))


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _gpu_peak(device: torch.device) -> dict[str, float]:
    return {"peak_gpu_gb": round((peak_bytes(device) or 0) / 1e9, 3)} if device.type == "cuda" else {}
