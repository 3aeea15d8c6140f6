"""Between HTTP and the calls of the API: bodies, answers, the key, clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.config.allowed_hosts import HostRule
from ingot.serve.api_call import event
from ingot.serve.api_errors import ApiError, too_busy
from ingot.serve.http.slow_bodies import SlowBodies
from ingot.serve.json_parts import in_parts

BODY_SECONDS = 60.0  # for a body to arrive, and for a client to take one piece of an answer
HEADER_BYTES = 64 << 10
# The event loop decodes a body, and streams wait for it: 8 MiB of text take 5 ms, of empty lists 2 s. Both
# bounds count what stands in strings, too.
MOST_OPENED = 1 << 15  # { and [
MOST_COMMAS = 1 << 18
Value = TypeVar("Value")
_log = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


async def read_body(request: Request, most: int) -> bytes:
    """The body, read no further than ``most`` bytes. Raises ClientDisconnectedError, and ApiError where it is
    too large (413), no JSON by its type (415), has too many values (400), or does not arrive (408).
    """
    check_coding(request)
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="request_timeout") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    if data.count(b"{") + data.count(b"[") > MOST_OPENED or data.count(b",") > MOST_COMMAS:
        text = f"the body has more than {MOST_OPENED} objects and lists, or {MOST_COMMAS} commas"
        raise ApiError(400, text, code="request_too_large")
    return bytes(data)


def check_coding(request: Request) -> None:
    """Raises ApiError (415) for a compressed body, whose full size is unknown."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        text = f"Content-Encoding: {coding:.40} is not supported; send the body as it is"
        raise ApiError(415, text, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def full_answer(request: Request, work: Awaitable[dict[str, Any]]) -> Response:
    """A JSON answer whose lists may be ``LazyList``; a large one is made and sent in parts. Raises as
    ``work``, and ClientDisconnectedError.
    """
    parts = in_parts(await until_disconnected(request, work))
    first = await anext(parts)
    second = await anext(parts, None)
    if second is None:
        return Response(first, media_type="application/json")
    return InParts(first + second, parts)


def error_answer(error: ApiError) -> Response:
    """An error before an answer has begun."""
    return json_answer(error.body(), error.status, error.headers)


async def until_disconnected(request: Request, work: Awaitable[Value]) -> Value:
    """What ``work`` returns; a client that disconnects cancels it, and raises ClientDisconnectedError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        await _cancelled(working, leaving)


async def event_stream(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """An answer that comes in events. It begins with the first of them, so that an error before it, which is
    raised, has a status of its own.
    """
    try:
        first = await until_disconnected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class InParts(Response):
    """An answer sent part by part until it ends, or the client disconnects or takes none for too long."""

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        media_type: str = "application/json",
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancelled(sending, leaving)
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS) as patience:
                await send(start)
                async for data in self._all():
                    patience.reschedule(clock() + BODY_SECONDS)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    patience.reschedule(None)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _all(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        async for data in self._rest:
            yield data


class EventStream(InParts):
    """Events; where their source fails, the last one says so."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(first, events, headers, "text/event-stream")

    async def _all(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        try:
            async for data in self._rest:
                yield data
        except ApiError as error:
            yield event(error.body())
        except Exception:
            _log.exception("an answer failed")
            yield event(ApiError(500, "internal error").body())


class Guard:
    """Checks in front of all routes: the size of the headers, the names of hosts, the key, and a bound on
    requests in flight, where the request whose body has been arriving longest makes room. HEAD is answered as
    GET, without its body; a slash at the end of a path is passed over.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, most_open: int, hosts: HostRule | None = None
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._most_open = most_open
        self._open = 0
        self._bodies = SlowBodies()
        self._wanted = None if api_key is None else api_key.lstrip(" ").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await error_answer(refusal)(scope, receive, send)
            return
        if scope.get("method") == "HEAD":  # whose body the HTTP server leaves out
            scope = {**scope, "method": "GET"}
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._open += 1
        try:
            with self._bodies.arriving() as complete:

                async def noting() -> Message:
                    message = await receive()
                    if not message.get("more_body", False):
                        complete()
                    return message

                await self._app(scope, noting, send)
        except ApiError as error:  # it was too slow
            await error_answer(error)(scope, receive, send)
        finally:
            self._open -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            text = f"the headers are larger than {HEADER_BYTES} bytes"
            return ApiError(431, text, code="headers_too_large")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            text = "Content-Length and Transfer-Encoding exclude each other"  # one may hide another request
            return ApiError(400, text, code="invalid_framing", headers={"Connection": "close"})
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        foreign = self._hosts and self._hosts.refusal(given.get(b"host"), given.get(b"origin"))
        if foreign:
            return ApiError(403, foreign, code="host_not_allowed")
        if scope["path"] == "/health":
            return None
        if self._is_allowed(scope):
            full = scope["method"] == "POST" and self._open >= self._most_open
            return too_busy("the server", self._open) if full and not self._bodies.make_room() else None
        text = "send the server's key as Authorization: Bearer …"
        return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_allowed(self, scope: Scope) -> bool:
        if self._wanted is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.lstrip(b" "), self._wanted)


async def _left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
