"""What a front does when a replica dies, and what a replica does when its engine does; without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt '.[ray]'")

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError

from ingot.adapters.ray import relay
from ingot.adapters.ray import replica as replica_module
from ingot.adapters.ray.replica import EngineReplica
from ingot.serve.api_errors import ApiError

START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"{}", "more_body": False}
TAKEN: list[dict[str, Any]] = []


class Handle:
    """A deployment whose calls give what stands in ``calls``, one after another: batches, or an error."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls = list(calls)
        self.asked = 0
        self.cancelled = 0
        self.answer = SimpleNamespace(remote=self._remote)

    def options(self, **_: Any) -> Handle:
        return self

    def _remote(self, *_: Any) -> Any:
        self.asked += 1
        return _Answer(self, self.calls[min(self.asked, len(self.calls)) - 1])


class _Answer:
    def __init__(self, handle: Handle, items: list[Any]) -> None:
        self._handle = handle
        self._items = self._given(items)

    async def _given(self, items: list[Any]) -> AsyncGenerator[Any, None]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    def __aiter__(self) -> Any:
        return self._items

    def cancel(self) -> None:
        self._handle.cancelled += 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_PAUSE", 0)


async def got(handle: Handle) -> list[Any]:
    return [message async for message in relay._messages(handle, "m", "key", {}, b"")]


async def test_a_request_that_is_not_taken_is_asked_again() -> None:
    handle = Handle([RayError()], [RayError()], [RayError()], [TAKEN, [START, BODY]])
    assert await got(handle) == [START, BODY]
    assert (handle.asked, handle.cancelled) == (4, 0)


async def test_no_replica_is_a_503() -> None:
    with pytest.raises(ApiError, match="no replica takes requests") as caught:
        await got(Handle([RayError()]))
    assert (caught.value.status, caught.value.code) == (503, "engine_dead")


async def test_what_has_not_begun_is_asked_again_once() -> None:
    assert await got(Handle([TAKEN, RayError()], [RayError()], [TAKEN, [START, BODY]])) == [START, BODY]
    handle = Handle([TAKEN, RayError()], [RayError()], [TAKEN, RayError()], [TAKEN, [START, BODY]])
    with pytest.raises(ApiError, match="has died") as caught:
        await got(handle)
    assert (caught.value.status, handle.asked) == (500, 3)


async def test_what_has_begun_ends_with_an_error() -> None:
    handle = Handle([TAKEN, [START], RayError()], [TAKEN, [START, BODY]])
    with pytest.raises(ApiError, match="has died") as caught:
        await got(handle)
    assert (caught.value.status, caught.value.code, handle.asked) == (500, "engine_dead", 1)


async def test_full_queues() -> None:
    with pytest.raises(ApiError, match="7 requests wait") as caught:
        await got(Handle([BackPressureError(7, 7)]))
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert caught.value.headers["Retry-After"]


async def test_who_leaves_cancels_the_call() -> None:
    handle = Handle([TAKEN, [START], [BODY]])
    messages = relay._messages(handle, "m", "key", {}, b"")
    assert await anext(messages) == START
    await messages.aclose()
    assert handle.cancelled == 1


def replica(app: Callable[..., Any], ended: list[int]) -> EngineReplica:
    """A replica of this application, whose process does not end."""
    found = object.__new__(EngineReplica)
    found._engine = SimpleNamespace(name="m", lost=None)  # type: ignore[assignment]
    found._app = app  # type: ignore[assignment]
    found._end = lambda: ended.append(1)  # type: ignore[method-assign]
    return found


async def test_a_replica_sends_what_its_application_sends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"asked"
        for message in (START, BODY):
            await send(message)

    batches = [batch async for batch in replica(app, []).answer({}, b"asked")]
    assert batches[0] == TAKEN
    assert [message for batch in batches for message in batch] == [START, BODY]


async def test_an_engine_lost_before_the_answer_began_is_an_error_of_the_call() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        found._engine.lost = "the engine's process has ended"
        await send({**START, "status": 500})

    found = replica(app, ended := [])
    answer = found.answer({}, b"")
    assert await anext(answer) == TAKEN
    with pytest.raises(RuntimeError, match="has ended"):
        await anext(answer)
    assert ended
    with pytest.raises(RuntimeError, match="has ended"):
        await anext(found.answer({}, b""))


async def test_who_leaves_a_replica_cancels_its_application() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        try:
            await receive()
        finally:
            ended.set()

    answer = replica(app, []).answer({}, b"")
    assert [await anext(answer), await anext(answer)] == [TAKEN, [START]]
    await answer.aclose()
    assert ended.is_set()


async def test_a_replica_keeps_reporting_after_a_failed_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    reported: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        if len(asked) == 1:
            raise ValueError("no such metric")
        for message in (START, BODY):
            await send(message)

    async def results_async(**_: Any) -> None:
        found._engine.lost = "the test is over"

    def broadcast(*given: Any) -> Any:
        reported.append(given)
        return SimpleNamespace(results_async=results_async)

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(replica_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica_module, "_TELL_SECONDS", 0)
    found = replica(app, [])
    await found._broadcast_facts(SimpleNamespace(broadcast=broadcast))
    assert [(note, model, name) for note, model, name, _ in reported] == [("note", "m", "r1")]
    assert "cannot send facts to the fronts" in caplog.text
