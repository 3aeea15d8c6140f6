"""One call of the API for answers: room in the queue, ids, answers, chunks."""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from ingot.config.sampling_params import SamplingParams
from ingot.llm.prompt_inputs import PromptLike
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.json_parts import LazyList, in_parts
from ingot.serve.request_schemas import Sampling
from ingot.serve.response_formats import AnswerFormat
from ingot.serve.served_model import ServedModel

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


class ApiCall(ABC):
    """A checked request.

    Attributes:
        body: what the client sent.
        count: answers that it asks for.
        messages: of its conversation; none of plain prompts.
        slots: of the conversation's pictures.
        cancelled: set when the client has disconnected.
        form: what the answers must be; None for any text.
    """

    id_prefix: str
    kind: str
    chunk_kind: str
    ends_with_done = True
    form: AnswerFormat | None = None
    names_no_usage: bool  # chunks before the last have ``usage: null``, where a client asked for usage

    def __init__(self, model: ServedModel, body: Sampling, count: int) -> None:
        self.model = model
        self.body = body
        self.count = count
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.slots: Sequence[int] = ()
        self.cancelled = threading.Event()
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage_always = self._with_usage and bool(options and options.continuous_usage_stats)
        self._no_usage = {"usage": None} if self._with_usage and self.names_no_usage else {}

    async def answer(self) -> dict[str, Any]:
        """The whole answer, whose lists may be ``LazyList``; raises ApiError."""
        async with self.begun(by_piece=False) as found:
            await found.finish()
            return self.full_answer(found)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing it ends the request. Raises ApiError."""
        async with self.begun(by_piece=True) as found:
            async for data in self.chunks(found):
                yield data
        if self.ends_with_done:
            yield DONE

    def full_answer(self, found: Answering) -> dict[str, Any]:
        choices = LazyList(lambda: self.choices(found), flat=False)
        return self.head(self.kind) | {"choices": choices, "usage": usage(found)}

    async def chunks(self, found: Answering) -> AsyncGenerator[bytes, None]:
        head = self.head(self.chunk_kind)
        async for choice in self.parts(found):
            usage_field = {"usage": usage(found)} if self._usage_always else self._no_usage
            if choice["logprobs"] is None:
                yield event(head | {"choices": [choice]} | usage_field)
                continue
            one = LazyList(partial(iter, (choice,)), flat=False)
            async for data in in_parts(head | {"choices": one} | usage_field, b"data: ", b"\n\n"):
                yield data
        if self._with_usage:
            yield event(head | {"choices": [], "usage": usage(found)})

    @abstractmethod
    def asked(self) -> tuple[Sequence[PromptLike], SamplingParams | None]:
        """The prompts and the values of their answers, without a chat format's stop strings; None: prompts
        are only scored.
        """

    @abstractmethod
    def jobs(self) -> list[Job]:
        """What the engine is asked; runs in a thread. Raises ApiError."""

    @abstractmethod
    def choices(self, found: Answering) -> Iterator[dict[str, Any]]:
        """The choices of the whole answer, made one after another."""

    @abstractmethod
    def parts(self, found: Answering) -> AsyncGenerator[dict[str, Any], None]:
        """The one choice of each chunk."""

    @asynccontextmanager
    async def begun(self, *, by_piece: bool) -> AsyncGenerator[Answering, None]:
        """What the engine answers, until the block ends. Raises ApiError."""
        with (
            self.model.engine.places(self.count),
            self.model.picture_slots(self.messages) as self.slots,
        ):
            jobs = await self.model.in_thread(self.jobs, cancelled=self.cancelled)
            jobs = [replace(job, salt=self.body.cache_salt or "") for job in jobs]
            field = None if self.form is None else self.form.field
            async with self.model.checked_grammars(jobs, field) as checked:
                with self.model.engine.answering(checked, self.model.tokenizer, by_piece=by_piece) as found:
                    try:
                        yield found
                    except ApiError as error:
                        if error.status < 500:  # what an engine refuses is the grammar
                            error.param = error.param or field
                        raise

    def head(self, kind: str) -> dict[str, Any]:
        """What every chunk of one answer begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}


def usage(found: Answering) -> dict[str, int]:
    """Tokens of the prompts and of all answers so far."""
    prompt = sum(len(job.ids) for job in found.jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": found.num_tokens,
        "total_tokens": prompt + found.num_tokens,
    }
