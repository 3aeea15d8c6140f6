"""One step of an engine, made ready to run again and again with the same inputs.

step = ready_step(side, "decode", batch=8, prompt_tokens=512); step.run()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.errors import ConfigError
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.observer import Observed
from ingot.measure.bench.profile.replaced import replaced
from ingot.measure.side.ingot_side import IngotSide
from ingot.runtime.executor import Executor
from ingot.runtime.scheduling.inputs import EncoderJob, RequestInput
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.step.runner import Runner

STEPS = ("prompt", "decode", "mixed", "encode")


@dataclass(frozen=True)
class ReadyStep:
    """A step whose requests, blocks and inputs are in place.

    Attributes:
        run: computes it and returns its tokens; every time the same. ``encode`` has none.
        outputs: computes it and returns its logits, of ``encode`` the encoder's outputs: float32 on the CPU.
        facts: requests, tokens and logits of the step, and tokens that its requests have in the cache.
        end: frees its requests; the executor then runs others as before.
    """

    runner: Runner
    run: Callable[[], list[int]]
    outputs: Callable[[], torch.Tensor]
    facts: dict[str, int]
    end: Callable[[], None]

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Inside, steps are launched kernel by kernel, without CUDA graphs; fused kernels stay."""
        runner, encoding = self.runner, self.runner.encoding
        with replaced(runner, "graphs", None), replaced(runner, "prompts", None):
            if encoding is None:
                yield
                return
            with replaced(encoding, "observer", _sees_nothing):
                yield


def _sees_nothing(name: str, value: Observed) -> None:
    """An encoder with an observer is launched kernel by kernel."""


def ready_step(side: IngotSide, kind: str, batch: int, prompt_tokens: int) -> ReadyStep:
    """The step ``kind`` of ``batch`` requests; their prompts are random tokens, and inputs random features.

    Raises:
        ConfigError: the model does not encode, or the cache does not hold the requests.
    """
    executor = side.llm.executor
    requests = _Requests(executor, side.vocab_size, prompt_tokens)
    executor.run_ahead = False
    executor.blocks.prefix_reuse = False
    if kind == "encode":
        return _encode(executor, requests, batch)
    if kind == "prompt":
        requests.add(batch)
        return _text_step(executor, requests)
    requests.add(batch - (kind == "mixed"))
    _until_decodes(executor)
    if kind == "mixed":
        requests.add(1)
    return _text_step(executor, requests)


class _Requests:
    """Adds requests that never end by themselves."""

    def __init__(self, executor: Executor, vocab_size: int, prompt_tokens: int) -> None:
        self._executor = executor
        self._vocab_size, self._tokens = vocab_size, prompt_tokens
        self._generator = torch.Generator().manual_seed(0)
        self._ids: list[str] = []
        self._before = executor.run_ahead, executor.blocks.prefix_reuse

    def add(self, count: int) -> None:
        room = self._executor.max_seq_len - self._tokens
        for _ in range(count):
            ids, inputs = self._prompt()
            params = SamplingParams(max_new_tokens=room, ignore_eos=True, temperature=0.0)
            self._ids.append(f"profile {len(self._ids)}")
            self._executor.add(self._ids[-1], ids, params, inputs)

    def end(self) -> None:
        for request_id in self._ids:
            self._executor.abort(request_id)
        self._executor.run_ahead, self._executor.blocks.prefix_reuse = self._before

    def _prompt(self) -> tuple[list[int], Sequence[RequestInput]]:
        """Random ids, after the longest input where the model has an encoder."""
        rules = self._executor.admission.inputs
        shape = (self._tokens,)
        ids = torch.randint(0, self._vocab_size, shape, generator=self._generator).tolist()
        if rules is None:
            return ids, ()
        longest = rules.encoder.longest
        features = torch.randn(longest, generator=self._generator)
        given = rules.read(features, 0)
        placeholders = rules.placeholders(given)
        if len(placeholders) >= self._tokens:
            raise ConfigError(
                "the prompt has no room for a picture and a token behind it",
                seen=f"{self._tokens} tokens",
                allowed=f"at least {len(placeholders) + 1}",
                field="prompt_tokens",
            )
        return [*placeholders, *ids[len(placeholders) :]], (given,)


def _scheduled(executor: Executor) -> ScheduledBatch:
    """The next step; it is not counted as computed, so that it can run again."""
    step = executor.scheduler.schedule(layered=False)
    if not step.requests or step.preempted:
        raise _no_room()
    return step


def _until_decodes(executor: Executor) -> None:
    """Compute prompts until every request decodes."""
    scheduler = executor.scheduler
    wanted = len(scheduler.waiting) + len(scheduler.running)
    while any(request.num_uncomputed != 1 or not request.output_ids for request in _all(executor)):
        executor.step()
        if len(_all(executor)) < wanted or executor.num_preemptions:
            raise _no_room()


def _all(executor: Executor) -> list[Any]:
    return [*executor.scheduler.running, *executor.scheduler.waiting]


def _no_room() -> ConfigError:
    return ConfigError(
        "the KV cache does not hold these requests at once",
        field=("batch", "prompt_tokens"),
        fix="a smaller `batch` or `prompt_tokens`, or a larger `memory_fraction`",
    )


def _text_step(executor: Executor, requests: _Requests) -> ReadyStep:
    """The next step of the decoder: its inputs are encoded now, since that is a step of its own here."""
    runner, step = executor.runner, _scheduled(executor)
    if step.jobs:
        _encoder_call(runner, step.jobs)()
        step = dataclasses.replace(step, jobs=[], in_parts=False)
    sampled = [item.request for item in step.requests if item.samples]
    draws = executor.selector.draws(sampled, counted=True)
    layout = step.layout
    facts = {
        "requests": layout.num_requests,
        "decodes": layout.num_single if layout.max_query_len > 1 else layout.num_requests,
        "tokens": layout.num_tokens,
        "logits": layout.num_logits,
        "cached_tokens": sum(layout.seq_lens) - layout.num_tokens,
    }

    def run() -> list[int]:
        return runner.launch(step, draws).wait()[0]

    def outputs() -> torch.Tensor:
        return runner.run(step).float().cpu()

    return ReadyStep(runner, run, outputs, facts, requests.end)


def _encode(executor: Executor, requests: _Requests, batch: int) -> ReadyStep:
    runner = executor.runner
    if runner.encoding is None:
        raise ConfigError(
            "this model encodes nothing", seen="encode", allowed="prompt, decode, mixed", field="step"
        )
    requests.add(batch)
    jobs = _scheduled(executor).jobs
    facts = {"inputs": len(jobs), "positions": sum(job.given.positions for job in jobs)}
    call = _encoder_call(runner, jobs)

    @torch.inference_mode()
    def outputs() -> torch.Tensor:
        """Each input's by itself."""
        way = EncoderPass(fused=runner.forward.fused)
        given = [job.given.features.to(runner.device) for job in jobs]
        return torch.cat([runner.model.encode(features[None], way) for features in given]).float().cpu()

    return ReadyStep(runner, call, outputs, facts, requests.end)


def _encoder_call(runner: Runner, jobs: Sequence[EncoderJob]) -> Callable[[], list[int]]:
    """Encodes the inputs and waits for the device."""
    encoding = runner.encoding
    assert encoding is not None

    def call() -> list[int]:
        encoding.encode(jobs, fused=runner.forward.fused, by_module=runner.eager)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        return []

    return call
