"""Which deployment a front asks; without a cluster."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt '.[ray]'")

from starlette.requests import Request

from ingot.adapters.ray.front import Front
from ingot.adapters.ray.merged_answers import ReplicaAnswer
from ingot.adapters.ray.ray_settings import RayArgs
from ingot.serve.api_errors import ApiError

START = {"type": "http.response.start", "status": 200, "headers": []}


class Handle:
    """A deployment that answers with its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.answer = SimpleNamespace(remote=self._remote)

    def options(self, **_: Any) -> Handle:
        return self

    async def _remote(self, *_: Any) -> AsyncGenerator[list[Any], None]:
        yield []
        yield [START, {"type": "http.response.body", "body": json.dumps(self._name).encode()}]


async def asked(path: str, query: bytes = b"") -> Any:
    """Who answers a GET."""
    args = RayArgs.from_json({"engines": [{"path": "a"}, {"path": "b"}]})
    front = Front(args, None, Handle("a"), Handle("b"))
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": []}
    answer = await front.get(Request(scope))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await answer(scope, None, send)  # type: ignore[arg-type]
    return json.loads(b"".join(message.get("body", b"") for message in sent))


async def posted(front: Front, size: int) -> int:
    """The status of a POST of ``size`` bytes."""
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    parts = iter([{"type": "http.request", "body": b" " * size, "more_body": False}])

    async def receive() -> Any:
        return next(parts)

    try:
        return (await front.post(Request(scope, receive))).status_code
    except ApiError as error:
        return error.status


async def test_bodies_are_larger_where_a_replica_takes_images() -> None:
    front = Front(RayArgs.from_json({"engines": [{"path": "a"}], "max_body": 4096}), None, Handle("a"))
    assert [await posted(front, size) for size in (4096, 4097)] == [200, 413]
    for takes, size, status in ((["text"], 4097, 413), (["text", "image"], 16 << 20, 200)):
        listed = json.dumps({"data": [{"id": "a", "input_modalities": takes}]}).encode()
        await front.note("a", "replica", {"/v1/models": ReplicaAnswer(200, {}, listed)})
        assert await posted(front, size) == status
    assert await posted(front, (16 << 20) + 1) == 413


async def test_the_model_of_a_question() -> None:
    assert await asked("/tokenizer_info", b"model=b") == "b"
    assert await asked("/tokenizer_info", b"model=a") == "a"
    assert await asked("/tokenizer_info") == "a"
    assert await asked("/v1/models/b") == "b"
    for path, query in (("/tokenizer_info", b"model=c"), ("/v1/models/c", b"")):
        with pytest.raises(ApiError, match="no such model: 'c'"):
            await asked(path, query)
