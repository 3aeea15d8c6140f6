"""The process of one engine: an executor and its loop.

Owns the loop: messages in, a step, one frame of news out. There is no other thread, so the executor is
touched by one alone, and text never costs a step anything. Knows token ids; text, HTTP and clients are the
server's.

    main(descriptor)      # of a connected socket whose other end says Load first
"""

from __future__ import annotations

import logging
import signal
import socket

import torch

from ingot.config.runtime import RuntimeConfig
from ingot.config.sampling import SamplingParams
from ingot.device import resolve_device
from ingot.errors import IngotError, RequestError, printable
from ingot.llm.opening import executor_of, open_engine
from ingot.runtime.executor import Executor, Update
from ingot.runtime.request import FinishReason
from ingot.serve.link import Link, LinkClosedError
from ingot.serve.protocol import (
    Abort,
    Add,
    Failed,
    Gauges,
    Load,
    Logprob,
    News,
    Ready,
    Reason,
    Score,
    Scored,
    Step,
    ToEngine,
)
from ingot.serve.scoring import keep_scores, scores

_REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def main(descriptor: int) -> int:
    """Serve one engine over a socket; returns the process's exit code.

    The process ends when the server closes the socket (0), or after an error, which it reports first (1).
    Signals that stop a group of processes are the server's: it lets answers end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLog())
    link = Link(socket.socket(fileno=descriptor))
    try:
        (load,) = link.exchange(wait=True)
        executor = _open(load)
        link.send(Ready(executor.admission.vocab_size, executor.max_batch_size, executor.max_seq_len))
        EngineLoop(executor, link).run()
    except LinkClosedError:
        return 0
    except BaseException as error:
        link.send(Failed.of(error))
        link.flush()
        if not isinstance(error, IngotError):
            raise
    return 1


class EngineLoop:
    """Runs an executor for one server."""

    def __init__(self, executor: Executor, link: Link) -> None:
        self._executor = executor
        self._link = link
        self._scoring: dict[str, list[int]] = {}

    def run(self) -> None:
        """Step while there is work, else wait for messages; it ends by an exception.

        Raises:
            LinkClosedError: the server has gone.
            BaseException: a step failed.
        """
        while True:
            messages = self._link.exchange(wait=not self._executor.has_work)
            news = [refused for message in messages for refused in self._obey(message)]
            updates = self._executor.step() if self._executor.has_work else []
            scored = []
            for update in updates:
                if update.request_id in self._scoring:
                    scored += self._score(update, news)
                else:
                    news.append(_news(update))
            if messages or updates:
                self._link.send(Step(news, scored, self._gauges()))

    def _obey(self, message: ToEngine) -> list[News]:
        """Carry out a message; a request that cannot be served gives news of its error."""
        try:
            match message:
                case Add(name, prompt_ids, params):
                    self._executor.add(name, prompt_ids, SamplingParams.from_json(params))
                case Score(name, prompt_ids, top):
                    self._executor.add_logits(name, prompt_ids, keep_scores(prompt_ids, top))
                    self._scoring[name] = prompt_ids
                case Abort(name, index):
                    self._executor.abort(name, index)
                    self._scoring.pop(name, None)
                case Load():
                    raise RequestError("an engine is loaded once", seen=message.path)
        except IngotError as error:
            if isinstance(message, (Add, Score)):
                return [News(message.id, 0, (), error=str(error))]
            raise
        return []

    def _score(self, update: Update, news: list[News]) -> list[Scored]:
        prompt_ids = self._scoring.pop(update.request_id)
        kept = self._executor.take_logits(update.request_id)
        if kept.isnan().any():
            news.append(News(update.request_id, 0, (), error="the model's logits are not numbers"))
            return []
        return [Scored(update.request_id, scores(prompt_ids, kept))]

    def _gauges(self) -> Gauges:
        scheduler, blocks = self._executor.scheduler, self._executor.blocks
        used = 1 - blocks.num_free / blocks.num_blocks
        prefix = scheduler.prefix_queries, scheduler.prefix_hits
        return Gauges(len(scheduler.running), len(scheduler.waiting), used, *prefix)


class _PrintableLog(logging.Formatter):
    """Warnings of the loader go to the server's stderr; they hold names from files of others."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open(load: ToEngine) -> Executor:
    """The executor of what is to be loaded, warmed up."""
    if not isinstance(load, Load):
        raise RequestError("an engine is loaded first", seen=type(load).__name__)
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    runtime = RuntimeConfig.from_json(load.runtime)
    lengths = {"max_batch_size": load.max_batch_size, "max_seq_len": load.max_seq_len}
    given = {"layers": None, "quant": None, "chat_template": None}
    device = resolve_device(load.device or "auto")
    engine = open_engine(load.path, device, given=given, limits={**lengths, "runtime": runtime})
    executor = executor_of(engine, runtime.of_engine(engine.manifest.build.kv_dtype))
    executor.warm_up(None)
    return executor


def _news(update: Update) -> News:
    logprobs = tuple(Logprob(one.token_id, one.logprob, one.top) for one in update.logprobs)
    reason = None if update.finish_reason is None else _REASONS[update.finish_reason]
    error = None if update.error is None else str(update.error)
    return News(update.request_id, update.index, update.token_ids, reason, update.stop_id, logprobs, error)
