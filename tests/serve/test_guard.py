"""Checks before all routes: host names, the key, framing, codings. No server and no engine."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from ingot.config.allowed_hosts import HostRule
from ingot.serve.app import bare_app
from ingot.serve.http.form_bodies import read_form
from ingot.serve.http.http_bodies import EventStream, read_body

LOCAL = {"host": "localhost:8000"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    + b"x" * (2 << 20)
    + b"\r\n--b--\r\n"
)


def ask(
    path: str = "/v1/models",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"{}",
    key: str | None = None,
    hosts: HostRule | None = None,
) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and body of an answer of the application with three routes."""
    app = bare_app(key, 10, hosts)

    @app.get("/v1/models")
    @app.get("/health")
    async def plain() -> Response:
        return Response(b"fine")

    @app.post("/body")
    async def of_body(request: Request) -> Response:
        return Response(await read_body(request, 1 << 20))

    @app.post("/form")
    async def of_form(request: Request) -> Response:
        async with read_form(request, 4 << 20, ()) as form:
            return Response(str(len(form.data())).encode())

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in (LOCAL | (headers or {})).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    data = b"".join(one.get("body", b"") for one in sent[1:])
    found = dict(sent[0]["headers"])
    is_json = found.get(b"content-type") == b"application/json"
    return sent[0]["status"], found, json.loads(data)["error"] if is_json else data


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere"])
def test_other_names_are_refused_everywhere(path: str) -> None:
    hosts = HostRule.of("127.0.0.1", ["chat.example"])
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        status, _, error = ask(path, headers=headers, hosts=hosts)
        assert (status, error["code"]) == (403, "host_not_allowed")
    for headers in ({"host": "chat.example"}, {"origin": "http://localhost:7860"}, {}):
        assert ask(path, headers=headers, hosts=hosts)[0] == (404 if path == "/nowhere" else 200)


def test_a_name_is_refused_before_the_key_is_asked_for() -> None:
    headers = {"host": "evil.example", "authorization": "Bearer K"}
    assert ask(headers=headers, key="K", hosts=HostRule.of("::1"))[0] == 403


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer K", 200),
        ("bearer K", 200),
        ("BEARER  K", 200),
        ("Bearer k", 401),
        ("Basic K", 401),
        ("BearerK", 401),
        ("K", 401),
        ("Bearer ", 401),
        ("Bearer K K", 401),
    ],
)
def test_the_scheme_of_the_key_has_no_case(given: str, status: int) -> None:
    assert ask(headers={"authorization": given}, key="K")[0] == status


def test_head_is_get() -> None:
    """The HTTP server leaves the body out."""
    assert ask("/health", "HEAD")[0] == ask("/health")[0] == 200
    assert ask("/v1/models", "HEAD", key="K")[0] == 401
    assert ask("/body", "HEAD")[0] == 405


def test_two_lengths_of_a_body_are_refused_and_the_connection_ends() -> None:
    headers = {"content-length": "2", "transfer-encoding": "chunked", "content-type": "application/json"}
    status, found, error = ask("/body", "POST", headers)
    assert (status, error["code"]) == (400, "invalid_framing")
    assert found[b"connection"] == b"close"


@pytest.mark.parametrize("path", ["/body", "/form"])
@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("GZIP, br", 415), ("identity", 200)])
def test_a_compressed_body_is_refused_by_name(path: str, coding: str, status: int) -> None:
    kind = FORM if path == "/form" else {"content-type": "application/json"}
    body = FILE if path == "/form" else b"{}"
    found = ask(path, "POST", {**kind, "content-encoding": coding}, body)
    assert found[0] == status
    if status == 415:
        assert found[2]["message"].startswith(f"Content-Encoding: {coding}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT])
def test_a_full_disk_is_a_507(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(number, "the reason")

    assert ask("/form", "POST", FORM, FILE)[::2] == (200, str(2 << 20).encode())
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    status, _, error = ask("/form", "POST", FORM, FILE)
    assert (status, error["code"], error["param"]) == (507, "no_room", "file")
    assert "the reason" in error["message"]
    assert [one.exc_info for one in caplog.records] == [None]


@pytest.mark.parametrize(
    ("asked", "status", "name", "value"),
    [
        (("/body", "GET"), 405, b"allow", b"POST"),
        (("/health", "POST", {"content-type": "application/json"}), 405, b"allow", b"GET"),
        (("/body", "POST", {"content-encoding": "br"}), 415, b"accept-encoding", b"identity"),
        (("/form", "POST", FORM | {"content-encoding": "br"}), 415, b"accept-encoding", b"identity"),
        (("/v1/models", "GET", {}, b"", "K"), 401, b"www-authenticate", b"Bearer"),
    ],
)
def test_a_refusal_lists_allowed_values(asked: Any, status: int, name: bytes, value: bytes) -> None:
    found = ask(*asked)
    assert (found[0], found[1].get(name)) == (status, value)
    assert found[1][b"content-type"] == b"application/json"
    assert found[2]["message"]


@pytest.mark.parametrize("named", [True, False], ids=["its length is named", "in chunks"])
@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)])
def test_a_body_may_have_just_the_most_bytes(named: bool, more: int, status: int) -> None:
    body = b" " * ((1 << 20) + more)
    length = {"content-length": str(len(body))} if named else {}
    found = ask("/body", "POST", {"content-type": "application/json"} | length, body)
    assert found[0] == status
    assert status == 200 or found[2]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),  # behind a proxy
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://elsewhere.example:8000", 403),
        ("null", 403),
    ],
)
def test_a_form_must_come_from_this_servers_own_pages(origin: str | None, status: int) -> None:
    headers = FORM if origin is None else FORM | {"origin": origin}
    found = ask("/form", "POST", headers, FILE)
    assert found[0] == status
    assert status == 200 or found[2]["code"] == "other_origin"


def test_events_are_kept_by_no_proxy() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"

    found = dict(EventStream(b"data: 1\n\n", events()).raw_headers)
    assert found[b"content-type"].split(b";")[0] == b"text/event-stream"
    assert (found[b"cache-control"], found[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert b"content-length" not in found


def test_a_slash_at_the_end_of_a_path() -> None:
    """Serves what the path without it does: a redirect would name http and lose what a proxy cut off."""
    assert ask("/v1/models/", key="k", headers={"authorization": "Bearer k"})[::2] == (200, b"fine")
    assert ask("/body/", "POST", {"content-type": "application/json"})[::2] == (200, b"{}")
    assert ask("/health/", key="k")[::2] == (200, b"fine")
    assert ask("/v1/models/", key="k")[0] == 401
    for path in ("/", "//", "/v1/", "/nothing/"):
        assert ask(path)[0] == 404
