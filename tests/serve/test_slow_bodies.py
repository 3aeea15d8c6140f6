"""Bounds on requests and uploads, and slow bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ingot.serve.api_errors import ApiError
from ingot.serve.http import form_bodies as forms
from ingot.serve.http import slow_bodies
from ingot.serve.http.form_bodies import Uploads
from ingot.serve.http.http_bodies import Guard

SOON = 20.0  # seconds; only a failing test waits this long
PART = {"type": "http.request", "body": b"x", "more_body": True}
END = {"type": "http.request", "body": b"", "more_body": False}


class Client:
    """One request through a guard: what it sends, and what it is answered."""

    def __init__(self, guard: Guard, method: str = "POST") -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        scope = {"type": "http", "method": method, "path": "/", "headers": []}
        self.task = asyncio.create_task(guard(scope, self.sent.get, self._take))  # type: ignore[arg-type]

    async def _take(self, message: Any) -> None:
        self.status = self.status or message.get("status")
        self.headers |= dict(message.get("headers", []))
        self.body += message.get("body", b"")


class App:
    """Reads bodies, and answers when it may."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.begun = self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        if scope["method"] == "POST":
            while (await receive())["more_body"]:
                continue
        self.read += 1
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def a_while() -> None:
    """So that what can go on has."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_bounded_before_their_bodies_are_read() -> None:
    """Two posts are in flight, the third is refused unread, and there is room again when one has ended;
    other methods take no room and need none.
    """

    async def main() -> None:
        app = App()
        guard = Guard(app, None, most_open=2)
        others = [Client(guard, "GET") for _ in range(3)]
        posts = [Client(guard) for _ in range(2)]
        await a_while()
        assert app.begun == 5
        third = Client(guard)
        await third.task
        assert (third.status, third.headers[b"retry-after"]) == (429, b"1")
        assert app.begun == 5
        others.append(Client(guard, "GET"))
        posts[0].sent.put_nowait(END)
        app.go_on.set()
        await asyncio.gather(posts[0].task, *(one.task for one in others))
        assert {one.status for one in others} == {posts[0].status} == {200}
        last = Client(guard)
        last.sent.put_nowait(END)
        await last.task
        assert last.status == 200
        posts[1].sent.put_nowait(END)
        await posts[1].task

    asyncio.run(asyncio.wait_for(main(), SOON))


def test_the_slowest_body_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that has just begun, nor one that is complete; its client learns why."""

    async def main() -> None:
        app = App()
        guard = Guard(app, None, most_open=3)
        complete, oldest = Client(guard), Client(guard)
        complete.sent.put_nowait(END)
        for one in (PART, PART):
            oldest.sent.put_nowait(one)
        await a_while()
        assert app.read == 1
        monkeypatch.setattr(slow_bodies, "SLOW_SECONDS", 0.05)
        await asyncio.sleep(0.1)
        fresh = Client(guard)
        await a_while()
        late = Client(guard)
        await a_while()
        assert (oldest.status, oldest.headers[b"connection"]) == (408, b"close")
        assert b"request_timeout" in oldest.body
        assert (fresh.status, late.status, complete.status) == (None, None, None)
        later = Client(guard)  # all that are left have just begun, or are complete
        await later.task
        assert later.status == 429
        app.go_on.set()
        for one in (fresh, late):
            one.sent.put_nowait(END)
        await asyncio.gather(*(one.task for one in (complete, oldest, fresh, late)))
        assert {one.status for one in (complete, fresh, late)} == {200}
        assert guard._open == 0
        assert not guard._bodies._arriving
        assert not guard._bodies._ended

    asyncio.run(asyncio.wait_for(main(), SOON))


def test_other_cancellations_are_not_slow_bodies() -> None:
    async def main() -> None:
        guard = Guard(App(), None, most_open=3)
        client = Client(guard)
        await a_while()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert client.status is None
        assert guard._open == 0

    asyncio.run(asyncio.wait_for(main(), SOON))


def test_a_slow_upload_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is complete keeps its place until it is decoded."""
    monkeypatch.setattr(forms, "_MOST_UPLOADS", 2)

    async def main() -> None:
        uploads, decoded = Uploads(), asyncio.Event()

        async def upload(arrives: asyncio.Event) -> int:
            try:
                async with uploads.one() as complete:
                    await arrives.wait()
                    complete()
                    await decoded.wait()
            except ApiError as error:
                return error.status
            return 200

        never, at_once = asyncio.Event(), asyncio.Event()
        at_once.set()
        first = asyncio.create_task(upload(at_once))
        slow = asyncio.create_task(upload(never))
        await a_while()
        assert await upload(at_once) == 429
        monkeypatch.setattr(slow_bodies, "SLOW_SECONDS", 0.0)
        third = asyncio.create_task(upload(at_once))
        assert await slow == 408
        assert await upload(at_once) == 429  # both are complete
        decoded.set()
        assert (await first, await third) == (200, 200)
        assert await upload(at_once) == 200
        assert uploads._open == 0

    asyncio.run(asyncio.wait_for(main(), SOON))
