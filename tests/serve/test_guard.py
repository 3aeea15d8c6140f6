"""What stands in front of all routes: names of hosts, the key, framing, codings. No server and no engine."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from ingot.config.hosts import HostRule
from ingot.serve.app import bare_app
from ingot.serve.forms import read_form
from ingot.serve.http import read_body

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
def test_a_compressed_body_is_told(path: str, coding: str, status: int) -> None:
    kind = FORM if path == "/form" else {"content-type": "application/json"}
    body = FILE if path == "/form" else b"{}"
    found = ask(path, "POST", {**kind, "content-encoding": coding}, body)
    assert found[0] == status
    if status == 415:
        assert found[2]["message"].startswith(f"Content-Encoding: {coding}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT])
def test_a_full_disk_is_told(
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
