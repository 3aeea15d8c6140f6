"""A request's way from the front to a replica, and its answer's way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ingot.serve.api_call import event
from ingot.serve.api_errors import ApiError, unavailable

_TRIES = 20
_PAUSE = 0.25  # seconds between them: a replica whose engine is lost ends within half a second
_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
_EVENTS = b"text/event-stream"


async def relayed(handle: Any, name: str, key: str, request: Request, body: bytes) -> Response:
    """The answer of one of the engine's replicas. It begins with its first piece, so that an error before it
    has a status of its own: ApiError where the queues are full or no replica is there (503), or it died
    (500).
    """
    # Without objects of this process, and the path as the application knows it.
    scope = {name: request.scope[name] for name in _KEPT if name in request.scope}
    scope |= {"root_path": "", "headers": [tuple(pair) for pair in request.scope["headers"]]}
    messages = _messages(handle, name, key, scope, body)
    try:
        begun = [await anext(messages), await anext(messages)]
    except BaseException:
        await messages.aclose()
        raise
    return Relayed(begun, messages)


class Relayed(Response):
    """Messages of a replica's application, as they come."""

    def __init__(self, begun: list[Message], rest: AsyncGenerator[Message, None]) -> None:
        super().__init__(status_code=begun[0]["status"])
        self._begun = begun
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for message in self._begun:
                await send(message)
            async for message in self._rest:
                await send(message)
        except ApiError as error:
            if _EVENTS not in dict(self._begun[0]["headers"]).get(b"content-type", b""):
                raise
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})
        finally:
            await self._rest.aclose()


async def _messages(
    handle: Any, name: str, key: str, scope: dict[str, Any], body: bytes
) -> AsyncGenerator[Message, None]:
    """Messages of the application. A request that no replica has taken is retried. One that was taken, and
    whose answer has not begun, is sent to another replica only once: it may be what the engine died of.
    """
    again = True
    for left in reversed(range(_TRIES)):
        taken = begun = False
        answer = handle.options(stream=True, session_id=key).answer.remote(scope, body)
        try:
            async for batch in answer:
                taken, begun = True, begun or bool(batch)
                for message in batch:
                    yield message
            return
        except (GeneratorExit, asyncio.CancelledError):
            answer.cancel()
            raise
        except BackPressureError as error:
            text = f"{name}: all replicas are busy, and {error.args[0]} requests wait already"
            raise unavailable(text, "queue_full") from None
        except (RayError, RayServeException):
            if begun or (taken and not again):
                text = f"{name}: the replica that answered has died"
                raise ApiError(500, text, code="engine_dead") from None
            if not left:
                raise unavailable(f"{name}: no replica takes requests", "engine_dead") from None
            again = again and not taken
            await asyncio.sleep(_PAUSE)
