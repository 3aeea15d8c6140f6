"""The process of one engine: an executor and its loop.

The loop's thread alone touches the executor; others only compile grammars. It knows token ids; text, HTTP and
clients are the server's.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.device import resolve_device, respect_quota
from ingot.errors import IngotError, RequestError, printable
from ingot.llm.batch_calls import keeping, pooled
from ingot.llm.open_engine import executor_of, open_engine
from ingot.runtime.executor import Executor, Update
from ingot.runtime.late_warm_up import LateWarmUp, begin_warm_up
from ingot.runtime.likelihood import keep_likelihood
from ingot.runtime.scheduling.inputs import RequestInput
from ingot.runtime.scheduling.request import FinishReason
from ingot.serve.engine_calls.garbage_collection import leave_out_what_is_loaded
from ingot.serve.engine_calls.grammar_compiling import Compiled, Compiling
from ingot.serve.engine_calls.process_link import Link, LinkClosedError
from ingot.serve.engine_calls.process_protocol import (
    Abort,
    Add,
    Attend,
    Embed,
    Embedded,
    Failed,
    Gauges,
    LoadEngine,
    Logprob,
    News,
    Ready,
    Reason,
    Scored,
    ScorePrompt,
    StepNews,
    ToEngine,
)
from ingot.serve.engine_calls.prompt_scoring import keep_scores, scores
from ingot.serve.engine_calls.speech_windows import WindowReader
from ingot.serve.engine_calls.text_files import check_manifest

# What a step takes of one prompt beside decodes, unless `prompt_chunk` says. On a GPU the
# prompts of most chats run whole: at 64 tokens per step the first token of 512 took three times as long
# (docs/results/load_curve/).
PROMPT_CHUNKS: dict[str, dict[str, Any]] = {
    "cuda": {"prompt_chunk": 64, "long_prompt": RuntimeConfig.token_budget},
    "cpu": {"prompt_chunk": 16, "long_prompt": 0},
}
_REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def main(descriptor: int) -> int:
    """Serve one engine over a connected socket, whose other end sends ``LoadEngine`` first. Returns the exit
    code: 0 when the server closes the socket, 1 after an error, which is reported first. Signals to a group
    of processes are the server's: it lets answers end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLog())
    link = Link(socket.socket(fileno=descriptor))
    try:
        (load,) = link.exchange(wait=True)
        executor, late = _open(load)
        assert isinstance(load, LoadEngine)
        leave_out_what_is_loaded()
        link.send(Ready(executor.admission.vocab_size, executor.max_batch_size, executor.max_seq_len))
        EngineLoop(executor, link, WindowReader.of(load.features), late).run()
    except LinkClosedError:
        return 0
    except BaseException as error:
        link.send(Failed.of(error))
        link.flush()
        if not isinstance(error, IngotError):
            raise
    return 1


class EngineLoop:
    """Runs an executor for one server; ``windows``: where features come from, None: nowhere; ``late``: what
    is left of its warm-up.
    """

    def __init__(
        self,
        executor: Executor,
        link: Link,
        windows: WindowReader | None = None,
        late: LateWarmUp | None = None,
    ) -> None:
        self._windows = windows
        self._late = late or LateWarmUp(executor.runner, ())
        self._executor = executor
        self._link = link
        self._reading: dict[str, ScorePrompt | Embed | Attend] = {}
        self._scores: OrderedDict[str, Iterator[tuple[list[Logprob], bool]]] = OrderedDict()
        grammars = executor.admission.grammars
        assert grammars is not None, "an executor has them, if only to refuse them"
        self._compiling = Compiling(grammars, executor.stop_ids, wake=link.wake)

    def run(self) -> None:
        """Step while there is work, else do a part of the warm-up, else wait for messages; ends by
        LinkClosedError, or the error of a step.
        """
        while True:
            messages = self._link.exchange(wait=not (self._busy or self._has_time))
            news = [refused for message in messages for refused in self._obey(message)]
            news += [refused for one in self._compiling.finished() for refused in self._add_compiled(one)]
            updates = self._executor.step() if self._executor.has_work else []
            read = []
            for update in updates:
                if update.request_id in self._reading:
                    read.append(self._read(update.request_id))
                else:
                    news.append(_news(update))
            scored = self._next_scores()
            if messages or updates or news or scored:
                news += [one for one in read if isinstance(one, News)]
                embedded = [one for one in read if isinstance(one, Embedded)]
                self._link.send(StepNews(news, scored, self._gauges(), embedded))
            elif self._has_time:
                self._late.do_part()

    @property
    def _busy(self) -> bool:
        return self._executor.has_work or bool(self._scores)

    @property
    def _has_time(self) -> bool:
        """Whether a part of the warm-up is left and nothing waits for this thread."""
        return self._late.left > 0 and not (self._busy or len(self._compiling))

    def _obey(self, message: ToEngine) -> list[News]:
        """Carry out a message; news of the error of a request that cannot be served."""
        try:
            match message:
                case Add(params=params) if params.get("grammar") is not None:
                    self._compiling.start(message)
                case Add(name, prompt_ids, params, slot, _, salt, pictures):
                    values, inputs = SamplingParams.from_json(params), self._inputs(slot, pictures)
                    self._executor.add(name, prompt_ids, values, inputs, salt=salt)
                case ScorePrompt(name, prompt_ids, top, salt):
                    self._executor.add_reading(name, prompt_ids, keep_scores(prompt_ids, top), salt=salt)
                    self._reading[name] = message
                case Embed(name, prompt_ids, pooling, salt):
                    self._executor.add_reading(name, prompt_ids, keeping(pooling), salt=salt, hidden=True)
                    self._reading[name] = message
                case Attend(name, prompt_ids, heads, below, slot):
                    kept, inputs = keep_likelihood(prompt_ids, below), self._inputs(slot)
                    self._executor.add_reading(name, prompt_ids, kept, inputs, heads)
                    self._reading[name] = message
                case Abort(name, index):
                    self._compiling.forget(name)
                    self._executor.abort(name, index)
                    self._reading.pop(name, None)
                    self._scores.pop(name, None)
                case LoadEngine():
                    raise RequestError("an engine is loaded once", seen=message.path)
        except IngotError as error:
            if isinstance(message, (Add, ScorePrompt, Embed, Attend)):
                return [_refusal(message.id, error)]
            raise
        return []

    def _inputs(self, slot: int | None, pictures: Sequence[tuple[int, int]] = ()) -> list[RequestInput]:
        """Inputs of a request whose features are in a slot, or that has pictures in several."""
        rules = self._executor.admission.inputs
        windows = self._windows
        if windows is None or rules is None:
            return []
        given = [*pictures] if slot is None else [(slot, 0)]
        return [rules.read(windows.get(one), place) for one, place in given]

    def _add_compiled(self, found: Compiled) -> list[News]:
        """Add a request whose grammar has been compiled; news of its error, if there is one."""
        add, compiled = found.add, found.result
        try:
            if isinstance(compiled, IngotError):
                raise compiled
            params, matcher = compiled
            inputs = self._inputs(add.slot, add.pictures)
            self._executor.add(add.id, add.prompt_ids, params, inputs, matcher=matcher, salt=add.salt)
        except IngotError as error:
            return [_refusal(add.id, error)]
        return []

    def _next_scores(self) -> list[Scored]:
        """The next part of one prompt's scores; prompts take turns."""
        if not self._scores:
            return []
        name, parts = self._scores.popitem(last=False)
        part, last = next(parts)
        if not last:
            self._scores[name] = parts
        return [Scored(name, part, last)]

    def _read(self, name: str) -> Embedded | News | None:
        """Results of a prompt that was only read; news of an error where they are not finite. Scores are sent
        in parts later.
        """
        asked = self._reading.pop(name)
        reading = self._executor.take_reading(name)
        kept = reading.kept
        if isinstance(asked, Attend):
            return Embedded(name, _floats(torch.cat([kept, reading.scores.flatten()])))
        if isinstance(asked, ScorePrompt):
            if not kept.isnan().any():
                self._scores[name] = scores(asked.prompt_ids, kept)
                return None
            return News(name, 0, (), error="the model's logits are not numbers")
        vector = normalize(pooled(kept, len(asked.prompt_ids), asked.pooling), dim=0)
        if vector.isfinite().all():
            return Embedded(name, _floats(vector))
        return News(name, 0, (), error="the model's hidden states are not finite")

    def _gauges(self) -> Gauges:
        scheduler, blocks = self._executor.scheduler, self._executor.blocks
        used = 1 - blocks.num_free / blocks.num_blocks
        waiting = len(scheduler.waiting) + len(self._compiling)
        prefix = scheduler.prefix_queries, scheduler.prefix_hits
        return Gauges(len(scheduler.running), waiting, used, *prefix)


class _PrintableLog(logging.Formatter):
    """For warnings of the loader on stderr, which may hold names from files of others."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open(load: ToEngine) -> tuple[Executor, LateWarmUp]:
    """The executor of what is to be loaded, and what is left of its warm-up."""
    if not isinstance(load, LoadEngine):
        raise RequestError("an engine is loaded first", seen=type(load).__name__)
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    else:
        respect_quota()
    check_manifest(Path(load.path), load.manifest)
    lengths = {"max_batch_size": load.max_batch_size, "max_seq_len": load.max_seq_len}
    given = {"layers": None, "quant": None, "chat_template": None}
    device = resolve_device(load.device or "auto")
    runtime = served_runtime(load.runtime, device.type)
    engine = open_engine(load.path, device, given=given, limits={**lengths, "runtime": runtime})
    executor = executor_of(engine, runtime.of_engine(engine.manifest.build.kv_dtype))
    late = begin_warm_up(executor, engine.plan)
    if executor.admission.grammars is not None:
        executor.admission.grammars.read_vocabulary()
    return executor, late


def served_runtime(values: dict[str, Any], device: str) -> RuntimeConfig:
    """A ``RuntimeConfig`` from JSON, with a server's own chunks on this kind of device by default."""
    if values.get("prompt_chunk") is None:
        share = values.get("prompt_share")
        values = values | PROMPT_CHUNKS[device] | ({} if share is None else {"prompt_share": share})
    return RuntimeConfig.from_json(values)


def _floats(values: torch.Tensor) -> bytes:
    data: bytes = values.numpy().astype("<f4").tobytes()
    return data


def _refusal(name: str, error: IngotError) -> News:
    return News(name, 0, (), error=str(error), refused=isinstance(error, RequestError))


def _news(update: Update) -> News:
    logprobs = tuple(Logprob(one.token_id, one.logprob, one.top) for one in update.logprobs)
    reason = None if update.finish_reason is None else _REASONS[update.finish_reason]
    if update.error is not None:  # the request's own: its grammar cannot go on
        return _refusal(update.request_id, update.error)
    return News(
        update.request_id, update.index, update.token_ids, reason, update.stop_id, logprobs,
        stop_logprob=update.stop_logprob, num_reused=update.num_reused,
    )  # fmt: skip
