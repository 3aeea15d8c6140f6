"""An engine, a checkpoint or random weights, opened by Ingot.

with IngotSide(SideSpec("engines/pocket-chat")) as side: side.logits([1, 2, 3])
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch

from ingot.config.quantization.quant_config import HEAD
from ingot.config.sampling_params import SamplingParams
from ingot.config.step_sizes import batch_buckets
from ingot.engine.assembly import logical_shapes
from ingot.engine.engine_loader import Engine
from ingot.errors import OutOfMemoryError
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.llm import LLM
from ingot.measure.side.freed_memory import free_memory, seconds_since
from ingot.measure.side.machine import Memory, forget_peak, gpu_peak, peak_bytes
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.step_work import Work, read_bytes
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask, warm_up_load

_WARM_UP_TOKENS = 3  # a prefill and two decode steps
_MOST_CPU_CACHE = 1 << 30  # bytes, for a batch that the cache of an engine on a CPU does not hold


@dataclass(frozen=True)
class Generated:
    """New tokens of one prompt, without an end token."""

    position: int
    token_ids: list[int]
    finish_reason: str


class IngotSide:
    """An ``LLM`` whose requests are streamed, all in flight at once."""

    def __init__(self, spec: SideSpec) -> None:
        start = time.perf_counter()
        self.llm = _load(spec)
        self.name = spec.title
        self.device, self.dtype = self.llm.engine.device, self.llm.engine.dtype
        self.load_s = seconds_since(start, self.device)
        executor = self.llm.executor
        self.max_seq_len, self.max_batch_size = executor.max_seq_len, executor.max_batch_size
        self.vocab_size = self.llm.engine.model.config.vocab_size
        self._runtime, self._warm_up_s = self.llm.runtime, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def work(self) -> Work:
        """The least that a step must read and compute."""
        model, cache = self.llm.engine.model, self.llm.executor.runner.caches[0]
        return Work.of(model.config, read_bytes(model), cache.keys.dtype)

    def warm_up(self, most: int | None = None) -> None:
        """Greedy graphs of all buckets up to ``most`` requests, and a generation; None: all graphs."""
        start = time.perf_counter()
        if most is None:
            self.llm.warm_up(kinds=["greedy"])
        else:
            sizes = {min(size, self.max_batch_size) for size in batch_buckets(most)}
            self.llm.warm_up(sorted(sizes), kinds=["greedy"])
            new_tokens = min(_WARM_UP_TOKENS, self.max_seq_len - 1)
            self.answer(*warm_up_load(self.vocab_size, min(most, self.max_batch_size), new_tokens))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """Answer all requests at once, greedily, past end tokens; records when tokens arrived."""
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

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """Greedy answers in the order in which they end. They may go on after a stop string."""
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
        """Log-probability of each token but the first: float32 [num_tokens - 1] on the CPU."""
        return self.llm.log_likelihood(ids)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after each token: float32 [num_tokens, vocab_size] on the CPU."""
        return self.llm.logits(ids)

    def resize(self, batch: int) -> None:
        """A new KV cache for exactly ``batch`` of the longest requests; the peak starts anew.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        self.resize_for(batch, [self.max_seq_len] * batch)

    def resize_for(self, batch: int, lengths: Sequence[int]) -> None:
        """As ``resize``, for the ``batch`` longest of requests of so many tokens, prompt and output."""
        self.max_batch_size = batch
        longest = sorted(lengths, reverse=True)[:batch]
        blocks = list(accumulate(map(self._blocks, longest)))
        self._reopen(blocks[-1])
        held = self.llm.executor.blocks.num_blocks
        room = sum(needed <= held for needed in blocks)
        if room < len(blocks):
            up_to = "up to " if min(longest) < longest[0] else ""
            raise OutOfMemoryError(
                "the KV cache does not hold the batch",
                seen=f"room for {room} of {batch} requests of {up_to}{longest[0]} tokens",
                fix="a smaller `batch`, fewer tokens, or a larger GPU",
            )

    def make_room(self, requests: int, tokens: int) -> None:
        """Let so many requests of ``tokens`` fit at once, if a CPU's default cache is smaller."""
        blocks = requests * self._blocks(tokens)
        default = self.device.type == "cpu" and self._runtime.cache_tokens is None
        if default and blocks > self.llm.executor.blocks.num_blocks:
            self._reopen(blocks)

    def memory(self) -> Memory:
        return Memory(_bytes(self.llm.engine), self._cache_bytes(), peak_bytes(self.device))

    def model_facts(self) -> dict[str, Any]:
        engine = self.llm.engine
        return {
            "architecture": engine.manifest.model.architecture,
            "parameters": _num_parameters(engine.model),
            "dtype": str(engine.dtypes),
            "quantization": engine.manifest.quant.label,
            "max_seq_len": self.max_seq_len,
            "load_s": round(self.load_s, 3),
            "device": str(self.device),
            "kv_dtype": self.llm.runtime.kv_dtype,
        }

    def facts(self) -> dict[str, Any]:
        engine, executor = self.llm.engine, self.llm.executor
        return {
            **self.model_facts(),
            "plan_gpu": engine.plan.gpu,
            "kernels": executor.runner.forward.kernels(),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_batch_size": self.max_batch_size,
            "runtime": self.llm.runtime.to_json(),
            "weights_gb": round(_bytes(engine) / 1e9, 3),
            "kv_cache_gb": round(self._cache_bytes() / 1e9, 3),
            "preemptions": executor.num_preemptions,
            **gpu_peak(self.device),
        }

    def close(self) -> None:
        """Free weights and cache for the model after this one."""
        del self.llm
        free_memory()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._runtime.block_size)

    def _reopen(self, blocks: int) -> None:
        """A new KV cache over the same weights, of so many blocks unless the spec has a size; on a CPU at
        most 1 GiB, or one longest request.
        """
        runtime = self._runtime
        if self.device.type == "cpu":
            block_bytes = self._cache_bytes() // self.llm.executor.blocks.num_blocks
            blocks = max(min(blocks, _MOST_CPU_CACHE // block_bytes), self._blocks(self.max_seq_len))
        if runtime.cache_tokens is None:
            runtime = runtime.replace(cache_tokens=blocks * runtime.block_size)
        engine = self.llm.engine
        limits = engine.manifest.build.replace(max_batch_size=self.max_batch_size)
        engine = dataclasses.replace(engine, manifest=engine.manifest.replace(build=limits))
        del self.llm
        forget_peak(self.device)
        self.llm = LLM.of_engine(engine, runtime)

    def _cache_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.llm.executor.runner.caches)


def _load(spec: SideSpec) -> LLM:
    if spec.random_weights is not None:
        return LLM.from_config(
            spec.random_weights,
            spec.device,
            dtype=spec.dtype,
            runtime=spec.runtime(),
            max_batch_size=spec.max_batch_size,
            max_seq_len=spec.max_seq_len,
            quant=spec.quant,
        )
    return LLM(
        spec.source,
        spec.device,
        compute_dtype=spec.dtype,
        runtime=spec.runtime(),
        max_batch_size=spec.engine_batch_size if spec.is_engine else spec.max_batch_size,
        max_seq_len=spec.max_seq_len,
        quant=None if spec.quant == "none" else spec.quant,
    )


def _num_parameters(model: Decoder) -> int:
    """Values before packing; a tied head has none of its own."""
    shapes = logical_shapes(model)
    return sum(
        math.prod(shape) for name, shape in shapes.items() if name != f"{HEAD}.weight" or not model.tied
    )


def _bytes(engine: Engine) -> int:
    """Of the weights on the device: an embedding may be on the host."""
    packed = sum(linear.packed_bytes for linear in linears(engine.model).values())
    return packed + sum(p.nbytes for p in engine.model.parameters() if p.device.type == engine.device.type)
