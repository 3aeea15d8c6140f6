"""An engine process and the requests that Triton gives it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ingot.adapters.triton.triton_images import prompt_of, read_images, slots_of
from ingot.adapters.triton.triton_replies import Channel, Replies, Reply
from ingot.adapters.triton.triton_request import Generate
from ingot.adapters.triton.triton_settings import Settings
from ingot.engine.manifest import is_engine
from ingot.errors import NoSuchPathError
from ingot.serve.api_errors import ApiError, stopping
from ingot.serve.engine_calls.answering import Job
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.garbage_collection import leave_out_what_is_loaded
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.served_model import ServedModel, TextSide

Value = TypeVar("Value")
CANCELLED = 499  # the status of a request that its client has given up
_LAST_SECONDS = 1.0  # for requests in flight to end with their error
_log = logging.getLogger(__name__)


def trusted_side(name: str, folder: Path, *, unproven: bool) -> TextSide:
    """What is known of an engine without its weights.

    Raises:
        NoSuchPathError: there is no engine.
        EngineError: it cannot be read, or has no proof and ``unproven`` is not set.
    """
    if not is_engine(folder):
        raise NoSuchPathError("not an engine folder", seen=folder, fix="make one with `ingot build`")
    side = TextSide.read(name, folder)
    allow = 'allow it: `unproven=True`, or in config.pbtxt the parameter unproven "true"'
    side.check_proof(unproven=unproven, allow=allow)
    return side


class Service:
    """One engine, for the threads of Triton's Python backend."""

    _model: ServedModel

    def __init__(self, side: TextSide, settings: Settings) -> None:
        self._side = side
        self._config = settings.serve_config()
        self._replies = Replies()
        self._grammars = GrammarChecks()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, name: str, settings: Settings, device: str, version: Path) -> Service:
        """Load the engine of a model whose model.py is in ``version``, and wait for it. Raises IngotError
        where it cannot be loaded, or is not to be trusted.
        """
        side = trusted_side(name, settings.folder(version), unproven=settings.unproven)
        service = cls(side, settings)
        load = settings.load(device, version)
        try:
            start = EngineClient.start(name, load, service._config, Metrics().of(name), side.features)
            service._model = ServedModel(side, service._wait(start), service._grammars)
            leave_out_what_is_loaded()
        except BaseException:
            service._end()
            raise
        return service

    @property
    def lost(self) -> str | None:
        """Why it takes no more requests; None while it does."""
        return self._model.engine.lost

    def refuse(self, channel: Channel, error: ApiError) -> None:
        self._replies.open(channel).fail(error)

    def submit(self, asked: Generate, channel: Channel) -> None:
        """Begin to answer a request; returns at once."""
        reply = self._replies.open(channel)
        self._loop.call_soon_threadsafe(self._begin, asked, reply)

    def close(self) -> None:
        """End the requests in flight with an error, and the engine."""
        self._wait(self._close())
        self._end()

    def _begin(self, asked: Generate, reply: Reply) -> None:
        task = self._loop.create_task(self._run(asked, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        reply.on_cancel(lambda: self._loop.call_soon_threadsafe(task.cancel))

    async def _run(self, asked: Generate, reply: Reply) -> None:
        """Answer one request; every way out ends its reply."""
        try:
            await self._answer(asked, reply)
        except ApiError as error:
            reply.fail(error)
        except asyncio.CancelledError:
            reply.fail(ApiError(CANCELLED, "the request was cancelled"))
        except Exception:
            _log.exception("a request failed")
            reply.fail(ApiError(500, "internal error"))

    async def _answer(self, asked: Generate, reply: Reply) -> None:
        model, cancelled = self._model, threading.Event()
        with model.engine.places(1), slots_of(model, asked.images) as slots:
            job = await model.in_thread(self._job, asked, reply, slots, cancelled, cancelled=cancelled)
            field = None if asked.form is None else asked.form.field
            async with model.checked_grammars([job], field) as jobs:
                with model.engine.answering(jobs, model.tokenizer, by_piece=True) as found:
                    async for _, piece in found.pieces():
                        reply.stepped()
                        if asked.stream:
                            reply.add(piece.text, len(piece.token_ids), piece.finish_reason)
                    (answer,) = found.answers(0)
            if not asked.stream:
                text = (asked.prompt if asked.echo else "") + (answer.text or "")
                reply.add(text, len(answer.token_ids), answer.finish_reason)

    def _job(self, asked: Generate, reply: Reply, slots: Sequence[int], cancelled: threading.Event) -> Job:
        """What the engine is asked; runs in a thread."""
        model = self._model
        params = asked.params(model.defaults.params, model.engine.limits.vocab_size)
        ids, starts = prompt_of(model, asked.prompt, len(asked.images))
        self._model.check_ids(ids, asked.new_tokens, "text_input")
        read_images(model, asked.images, slots, cancelled)
        reply.num_input_tokens = len(ids)
        pictures = tuple(zip(slots, starts, strict=True))
        return Job(ids, model.held(params, asked.form, ids), ids, pictures=pictures)

    async def _close(self) -> None:
        self._model.engine.fail_all(stopping())
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=_LAST_SECONDS)
            for task in left:  # whose prompt is still being tokenized
                task.cancel()
        self._grammars.close()
        self._model.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._model.engine.close()

    def _wait(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._replies.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
