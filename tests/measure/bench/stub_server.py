"""A server of the OpenAI protocol that streams tokens at a known pace, and fails as it is told to.

It notes on ``time.perf_counter``, which processes of one machine share on Linux, when it sends each token.

    with running(Stub(gap_s=0.01)) as url: ...
    python -m tests.measure.bench.stub_server --gap-ms 10       # prints its URL; GET /sent has the times
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_END = b"0\r\n\r\n"
Send = Callable[[Any], None]


@dataclass
class Stub:
    """What it serves, and how.

    Attributes:
        first_s, gap_s: until the first token, and between two.
        tokens_per_chunk: tokens that share a chunk.
        role_at_once: a chat begins with a chunk without text, sent before the first token.
        fault: None, or what goes wrong: a status such as 429, "whole" (no stream), "cut" (the connection ends
            after three tokens), "error" (reported within the stream), "json" (a chunk that is none),
            "empty" (no tokens), "hang" (no answer).
        faulty: whether the request of this number (from 0) has the fault.
        bodies, sent: the requests in the order in which they came, and when their chunks were sent.
    """

    first_s: float = 0.01
    gap_s: float = 0.002
    models: tuple[str, ...] | None = ("stub",)
    key: str | None = None
    usage: bool = True
    tokens_per_chunk: int = 1
    role_at_once: bool = False
    most_tokens: int | None = None
    fault: int | str | None = None
    faulty: Callable[[int], bool] = lambda number: True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection, one after another."""
        try:
            while await self._one(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether another request may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            _whole(writer, 401, {"error": {"message": "Incorrect API key"}})
        elif path == "/sent":
            _whole(
                writer, 200, [[b["prompt"], times] for b, times in zip(self.bodies, self.sent, strict=True)]
            )
        elif path == "/v1/models" and self.models is not None:
            _whole(writer, 200, {"data": [{"id": name, "owned_by": "stub"} for name in self.models]})
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            return await self._complete(json.loads(body), "chat" in path, writer)
        else:
            _whole(writer, 404, {"detail": "Not Found"})
        return True

    async def _complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> bool:
        number = len(self.bodies)
        times: list[float] = []
        self.bodies.append(body)
        self.sent.append(times)
        fault = self.fault if self.faulty(number) else None
        if fault == "hang":
            await asyncio.sleep(60)
        if isinstance(fault, int):
            _whole(writer, fault, {"error": {"message": f"told to answer {fault}"}})
            return True
        if fault == "whole":
            _whole(writer, 200, {"choices": [{"text": "all at once"}]})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        wanted = body["max_tokens"] if self.most_tokens is None else min(body["max_tokens"], self.most_tokens)
        if not await self._stream(wanted, chat, fault, writer, times):
            return False
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            counts = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": wanted}
            _event(writer, {"choices": [], "usage": counts})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(_END)
        return True

    async def _stream(
        self, wanted: int, chat: bool, fault: object, writer: asyncio.StreamWriter, times: list[float]
    ) -> bool:
        """The tokens at their pace; whether the connection still stands."""
        if chat and self.role_at_once:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        due = time.perf_counter() + self.first_s
        for place in range(0, 0 if fault == "empty" else wanted, self.tokens_per_chunk):
            await asyncio.sleep(due - time.perf_counter())
            due += self.gap_s
            if place == 3 and fault == "cut":
                return False
            if place == 3 and fault == "error":
                _event(writer, {"error": {"message": "out of blocks"}})
            if place == 3 and fault == "json":
                _chunk(writer, b"data: {]\n\n")
            times.append(time.perf_counter())
            _event(writer, {"choices": [_choice(chat, "word ", None)]})
        _event(writer, {"choices": [_choice(chat, "", "length")]})
        return True


def _choice(chat: bool, text: str, reason: str | None) -> dict[str, Any]:
    reported = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return {"index": 0, **reported, "logprobs": None, "finish_reason": reason}


def _prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    facts = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "stub"}
    _chunk(writer, b"data: " + json.dumps(facts | value).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} Told\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


@contextmanager
def running(stub: Stub) -> Iterator[str]:
    """The stub in a thread of its own, and its URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=10)
    parser.add_argument("--gap-ms", type=float, default=10)
    asked = parser.parse_args()
    stub = Stub(asked.first_ms / 1e3, asked.gap_ms / 1e3)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
