"""Hugging Face's class, opened beside an engine.

with HuggingFaceSide(SideSpec("checkpoint", kind="hf")) as side: side.complete([[1, 2, 3]], new_tokens=8)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from ingot.checkpoint.hub import resolve_checkpoint
from ingot.device import dtype_name, resolve_device
from ingot.measure.side.freed_memory import free_memory, seconds_since
from ingot.measure.side.huggingface import (
    check_huggingface,
    class_config,
    class_dtype,
    class_memory,
    generation_defaults,
    load_class,
    transformers_version,
)
from ingot.measure.side.ingot_side import Generated
from ingot.measure.side.machine import Memory, forget_peak, gpu_peak, peak_bytes
from ingot.measure.side.side_spec import SideSpec, decoder_config, most_tokens
from ingot.measure.side.step_work import Work, weight_bytes
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask, warm_up_load
from ingot.runtime.likelihood import target_logprobs

_PAD = 0


class HuggingFaceSide:
    """``AutoModelForCausalLM.generate``, greedy, in padded batches, with the class's defaults of attention
    and cache. Qwen v1, which the library lacks, runs as Qwen2.
    """

    name = "huggingface"

    def __init__(self, spec: SideSpec) -> None:
        check_huggingface(spec.path)
        start = time.perf_counter()
        self.device = resolve_device(spec.device)
        is_random = spec.random_weights is not None
        source = Path(spec.random_weights) if spec.random_weights else resolve_checkpoint(spec.path or "")
        self.config = decoder_config(class_config(source))
        self.dtype = class_dtype(source, spec.dtype, self.device, is_random=is_random)
        fix = "leave out `against=hf`, or use `device=cuda`"
        self.model = load_class(source, self.dtype, self.device, fix, is_random=is_random)
        self.model.generation_config = generation_defaults(_PAD)  # never ends early
        self.load_s = seconds_since(start, self.device)
        self.max_seq_len, self.max_batch_size = most_tokens(spec, self.config), spec.max_batch_size
        self.vocab_size = int(self.model.config.vocab_size)
        self._warm_up_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def work(self) -> Work:
        """The least that a step must read and compute."""
        tables = [m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)]
        read = weight_bytes(self.model, [*tables], self.model.get_output_embeddings())
        return Work.of(self.config, read, self.dtype)

    @torch.inference_mode()
    def complete(self, prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> torch.Tensor:
        """Greedy tokens after prompts padded on the left: [prompts, at most new_tokens]."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), _PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        done: torch.Tensor = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            **options,
        )
        return done[:, width:]

    def warm_up(self, most: int | None = None) -> None:
        start = time.perf_counter()
        self.answer(*warm_up_load(self.vocab_size, min(most or 1, self.max_batch_size), 2))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """In batches of ``max_batch_size``, in order; a batch runs until its longest answer ends."""
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

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """As ``answer``, up to an end token. The caller cuts the text at stop strings."""
        for first in range(0, len(prompts), self.max_batch_size):
            part = prompts[first : first + self.max_batch_size]
            most = min(new_tokens, self.max_seq_len - max(map(len, part)))
            with class_memory("`against_batch`"):
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

    def resize(self, batch: int) -> None:
        """Padded batches of ``batch`` rows from now on."""
        forget_peak(self.device)
        self.max_batch_size = batch

    def resize_for(self, batch: int, lengths: Sequence[int]) -> None:
        """As ``resize``: ``generate`` makes a cache for each batch, whatever the lengths."""
        self.resize(batch)

    def make_room(self, requests: int, tokens: int) -> None:
        """No-op: ``generate`` makes a cache for each batch."""

    def memory(self) -> Memory:
        """The cache is that of a batch of the longest requests."""
        cache = self.max_batch_size * self.max_seq_len * self.work.kv_bytes
        return Memory(sum(p.nbytes for p in self.model.parameters()), cache, peak_bytes(self.device))

    def model_facts(self) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "transformers": transformers_version(),
            "attention": self.model.config._attn_implementation,
            "dtype": dtype_name(self.dtype),
            "load_s": round(self.load_s, 3),
            "device": str(self.device),
        }

    def facts(self) -> dict[str, Any]:
        return {
            **self.model_facts(),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_seq_len": self.max_seq_len,
            "max_batch_size": self.max_batch_size,
            **gpu_peak(self.device),
        }

    def close(self) -> None:
        """Free the weights for the model after this one."""
        del self.model
        free_memory()

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in the model's dtype, on its device."""
        with class_memory("`window`"):
            out = self.model(torch.tensor([ids], device=self.device), use_cache=False)
        logits: torch.Tensor = out.logits
        return logits[0]


class _Arrivals:
    """A streamer that records when ``generate`` hands over a step's tokens; the first are the prompt."""

    def __init__(self) -> None:
        self._seen_prompt = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.times.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None: ...
