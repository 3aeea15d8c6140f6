"""Calls to an engine's loop, and how threads and coroutines wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from queue import Empty, SimpleQueue

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.engine.engine_text import TextParts
from ingot.errors import RequestError
from ingot.llm.active_requests import ActiveRequest, Call, LogitsRequest, News
from ingot.llm.engine_loop import ExecutorLoop
from ingot.llm.outputs import Output, Piece
from ingot.llm.prompt_inputs import Entry, with_chat_stops
from ingot.runtime.executor import Executor
from ingot.runtime.likelihood import Keep, keep_last, keep_sum
from ingot.runtime.step.cross_scores import Head
from ingot.text.grammar.grammar_compiler import with_text_start

Pieces = list[tuple[int, Piece]]
Progress = Callable[[int, int], None]  # prompts that are answered, prompts
_KEPT = {"mean": keep_sum, "last": keep_last}


class Calls:
    """Calls to one executor, from any thread. A caller that stops waiting ends its own requests alone."""

    def __init__(self, executor: Executor, text: TextParts) -> None:
        self.loop = ExecutorLoop(executor)
        self._executor = executor
        self._text = text

    def requests(self, entries: Sequence[Entry], params: Sequence[SamplingParams]) -> list[ActiveRequest]:
        """Requests that can be served; not started.

        Raises:
            RequestError: a prompt or value cannot be served.
        """
        requests = []
        for position, (entry, values) in enumerate(zip(entries, params, strict=True), start=1):
            tokenizer, context = self._text.tokenizer, entry.context
            values = with_chat_stops(values, self._text) if entry.is_chat else values
            values = with_text_start(values, tokenizer, context)
            with _numbered(position, entries):
                self._executor.admission.check(entry.ids, values, entry.inputs)
                matcher = self._executor.admission.matcher(values)
            requests.append(ActiveRequest(entry.ids, values, tokenizer, context, entry.inputs, matcher))
        return requests

    def generate(self, requests: Sequence[ActiveRequest], progress: Progress | None = None) -> list[Output]:
        if progress is None:
            self._finish(requests)
        else:
            ended: set[int] = set()
            with closing(self.stream(requests)) as pieces:
                for position, piece in pieces:
                    if piece.finish_reason is not None and position not in ended and requests[position].done:
                        ended.add(position)
                        progress(len(ended), len(requests))
        return [request.output() for request in requests]

    def read(self, entry: Entry, keep: Keep, heads: Sequence[Head] = ()) -> LogitsRequest:
        """What ``keep`` leaves of a prompt's logits, and scores of heads of cross-attention.

        Raises:
            RequestError: the prompt is empty, too long, or holds unknown ids; or the model does not take its
                inputs.
        """
        reading = self._reading(entry, keep, heads=heads)
        self._finish([reading])
        return reading

    def read_hidden(self, entries: Sequence[Entry], keep: Keep) -> list[torch.Tensor]:
        """What ``keep`` leaves of each prompt's last hidden states; the prompts share steps. Raises as
        ``read``, before anything is computed.
        """
        readings = []
        for position, entry in enumerate(entries, start=1):
            with _numbered(position, entries):
                readings.append(self._reading(entry, keep, hidden=True))
        self._finish(readings)
        return [reading.kept for reading in readings]

    def stream(self, requests: Sequence[ActiveRequest]) -> Generator[tuple[int, Piece], None, None]:
        """Answer requests piece by piece, from the first ``next`` on: (position of the request, piece)."""
        news: SimpleQueue[News] = SimpleQueue()
        call = Call(requests, news.put, by_piece=True)
        try:
            self.loop.start(call)
            while (pieces := self._next(call, news)) is not None:
                yield from pieces
        finally:
            self.loop.end(call)

    async def agenerate(self, requests: Sequence[ActiveRequest]) -> list[Output]:
        call, news = _async_call(requests)
        try:
            self.loop.start(call)
            await self._anext(call, news)
        finally:
            self.loop.cancel(call)
        return [request.output() for request in requests]

    async def astream(self, requests: Sequence[ActiveRequest]) -> AsyncGenerator[tuple[int, Piece], None]:
        call, news = _async_call(requests, by_piece=True)
        try:
            self.loop.start(call)
            while (pieces := await self._anext(call, news)) is not None:
                for piece in pieces:
                    yield piece
        finally:
            self.loop.cancel(call)

    def _finish(self, requests: Sequence[ActiveRequest | LogitsRequest]) -> None:
        news: SimpleQueue[News] = SimpleQueue()
        call = Call(requests, news.put)
        try:
            self.loop.start(call)
            self._next(call, news)
        finally:
            self.loop.end(call)

    def _next(self, call: Call, news: SimpleQueue[News]) -> Pieces | None:
        try:
            found = news.get_nowait()
        except Empty:
            self.loop.wait(call)
            found = news.get()
        return _opened(found)

    async def _anext(self, call: Call, news: asyncio.Queue[News]) -> Pieces | None:
        if news.empty():
            self.loop.wait(call)
        return _opened(await news.get())

    def _reading(
        self, entry: Entry, keep: Keep, *, hidden: bool = False, heads: Sequence[Head] = ()
    ) -> LogitsRequest:
        admission = self._executor.admission
        admission.check_inputs(entry.inputs)
        return LogitsRequest(
            admission.checked_ids(entry.ids, room=0), keep, entry.inputs, hidden=hidden, heads=heads
        )


@contextmanager
def _numbered(position: int, entries: Sequence[Entry]) -> Iterator[None]:
    """Put the prompt's number before the message of a refusal, where there are several prompts."""
    try:
        yield
    except RequestError as error:
        what = f"prompt {position}: {error.what}" if len(entries) > 1 else error.what
        raise RequestError(
            what, seen=error.seen, allowed=error.allowed, fix=error.fix, field=error.fields
        ) from None


def only_pieces(pieces: Generator[tuple[int, Piece], None, None]) -> Generator[Piece, None, None]:
    """The pieces of a stream of one request."""
    with closing(pieces):
        for _, piece in pieces:
            yield piece


async def only_async_pieces(pieces: AsyncGenerator[tuple[int, Piece], None]) -> AsyncGenerator[Piece, None]:
    async with aclosing(pieces):
        async for _, piece in pieces:
            yield piece


def _async_call(
    requests: Sequence[ActiveRequest], *, by_piece: bool = False
) -> tuple[Call, asyncio.Queue[News]]:
    """A call whose news come to the running event loop."""
    news: asyncio.Queue[News] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(found: News) -> None:
        loop.call_soon_threadsafe(news.put_nowait, found)

    return Call(requests, post, by_piece), news


def _opened(news: News) -> Pieces | None:
    if isinstance(news, BaseException):
        raise news
    return news


def keeping(pooling: str) -> Keep:
    """What is kept of each chunk's hidden states; raises RequestError where the pooling is unknown."""
    if pooling not in _KEPT:
        raise RequestError("unknown pooling", seen=pooling, allowed=", ".join(_KEPT), field="pooling")
    return _KEPT[pooling]


def pooled(chunks: torch.Tensor, num_tokens: int, pooling: str) -> torch.Tensor:
    """What was kept of a prompt's chunks, float32 [chunks, hidden_size], as its vector [hidden_size]."""
    return chunks[-1] if pooling == "last" else chunks.sum(0) / num_tokens
