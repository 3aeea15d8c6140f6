"""Fields that the server does not know: the answer is as without them, and a header and the log name them."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest
from starlette.requests import Request

from ingot.serve import ignored_fields, request_schemas
from ingot.serve.ignored_fields import IGNORED, IgnoredFields, note_ignored
from tests.serve.client import Server
from tests.serve.conftest import chat, completion
from tests.serve.recordings import transcribe

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = IGNORED.lower()


def headers_of(reply_headers: dict[str, str]) -> str | None:
    return {name.lower(): value for name, value in reply_headers.items()}.get(HEADER)


@pytest.mark.parametrize("stream", [False, True])
def test_a_typo_is_named(stream: bool, server: Server) -> None:
    body = completion(stream=stream, max_tokens=3, temperature=0)
    plain = server.post(COMPLETIONS, body)
    reply = server.post(COMPLETIONS, body | {"max_token": 9, "num_beams": 4, "user": "me"})
    assert reply.status == plain.status == 200
    assert headers_of(reply.headers) == "max_token, num_beams, user"
    assert headers_of(plain.headers) is None
    assert reply.headers.keys() - plain.headers.keys() == {HEADER}
    assert not plain.headers.keys() - reply.headers.keys()
    if not stream:
        assert reply.json["choices"] == plain.json["choices"]


def test_an_error_s_answer_names_it(server: Server) -> None:
    reply = server.post(CHAT, chat(temperature=1e300, tempreature=1))
    assert reply.status == 400
    assert headers_of(reply.headers) == "tempreature"


def test_names_from_strangers(server: Server) -> None:
    """Neither split a header nor fill it."""
    reply = server.post(COMPLETIONS, completion(max_tokens=1, **{"a\r\nx-evil: 1, ü\u2028": 1}))
    assert headers_of(reply.headers) == "a\\x0d\\x0ax-evil: 1\\x2c \\xfc\\u2028"
    assert "x-evil" not in reply.headers
    reply = server.post(
        COMPLETIONS, completion(max_tokens=1) | {f"{i:03}{'é' * 5000}": 1 for i in range(100)}
    )
    assert reply.status == 200
    assert len(headers_of(reply.headers) or "") < 8000
    assert server.post(COMPLETIONS, completion(max_tokens=1) | {"": 1}).status == 200


def noted(data: dict[str, object], kind: type[msgspec.Struct]) -> list[str]:
    request = Request({"type": "http", "state": {}})
    note_ignored(request, kind, json.dumps(data).encode())
    return getattr(request.state, IGNORED)


def test_the_log_has_each_name_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_fields, "_hour", -ignored_fields._HOUR)
    caplog.set_level(logging.WARNING)
    kind = request_schemas.CompletionRequest
    for _ in range(3):
        assert noted({"prompt": "a", "max_token": 1, "user": "x"}, kind) == ["max_token", "user"]
        noted({"num_beams\x1b[2J": 3}, kind)
    assert [record.getMessage() for record in caplog.records] == [
        "a client sent the field max_token, which is ignored (is it max_tokens?)",
        "a client sent the field num_beams\\x1b[2J, which is ignored",
    ]
    noted({"min_new_tokens": 1}, kind)
    assert caplog.records[-1].getMessage().endswith("(is it min_tokens?)")
    for i in range(1000):
        noted({f"{i}" * 50: 1}, kind)
    assert len(caplog.records) == 101
    assert caplog.records[-1].getMessage() == (
        "clients sent more than 100 names of fields that are ignored; others are not logged for up to an hour"
    )


def test_the_log_has_a_name_again_after_an_hour(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [5.0]
    monkeypatch.setattr(ignored_fields, "_hour", -ignored_fields._HOUR)
    monkeypatch.setattr(ignored_fields.time, "monotonic", lambda: clock[0])
    caplog.set_level(logging.WARNING)
    for i in range(300):
        noted({f"name{i}": 1}, request_schemas.CompletionRequest)
    for now, count in ((3604.0, 101), (3605.0, 102), (3606.0, 102), (7204.0, 102), (7205.0, 103)):
        clock[0] = now
        noted({"num_beams": 1}, request_schemas.CompletionRequest)
        assert len(caplog.records) == count


def test_a_name_of_half_a_character_is_nobody_s(server: Server) -> None:
    data = b'{"model": "pocket", "prompt": "a", "max_tokens": 1, "\\ud800": 1}'
    reply = server.post(COMPLETIONS, data)
    assert reply.status == 400
    assert headers_of(reply.headers) is None


def test_a_required_field_with_a_typo(server: Server) -> None:
    reply = server.post(COMPLETIONS, {"model": "pocket", "promt": "a"})
    assert reply.status == 400
    assert headers_of(reply.headers) == "promt"


def test_a_form_s_field(speech_server: Server) -> None:
    reply = transcribe(speech_server, b"noise", langauge="de", timestamp_granularity=["word"])
    assert reply.status == 400  # of the file
    assert headers_of(reply.headers) == "langauge, timestamp_granularity[]"


async def test_other_scopes_pass() -> None:
    seen = []

    async def app(scope: object, receive: object, send: object) -> None:
        seen.append((scope, send))

    async def send(message: object) -> None: ...

    await IgnoredFields(app)({"type": "lifespan"}, send, send)  # type: ignore[arg-type]
    assert seen[0][1] is send
