"""``X-Ingot-Explain: 1`` adds the report of ``ingot explain`` to an unchanged answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot import LLM
from ingot.serve.engine_calls.process_protocol import Ready
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.served_model import ServedModel, TextSide
from tests.serve.client import JSON, Server
from tests.serve.conftest import chat, completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "ingot_explain"


def asked(server: Server, path: str, body: dict[str, Any], header: str = "1") -> Any:
    return server.request("POST", path, body, {**JSON, "X-Ingot-Explain": header})


def test_a_chat(server: Server, llm: LLM) -> None:
    body = chat(temperature=0.5, seed=3, max_tokens=8, stop=["\n"], min_tokens=1)
    found = asked(server, CHAT, body).json
    plain = server.post(CHAT, body).json
    assert KEY not in plain
    values = {"temperature": 0.5, "seed": 3, "max_new_tokens": 8, "stop": ("\n",), "min_new_tokens": 1}
    assert found[KEY] == json.loads(json.dumps(llm.explain(body["messages"], values).to_json()))
    assert found["choices"] == plain["choices"]
    assert found["usage"]["prompt_tokens"] == found[KEY]["num_prompt_tokens"]


def test_default_lengths(server: Server) -> None:
    """A chat has the engine's own, a completion the API's."""
    explained = asked(server, CHAT, chat()).json[KEY]
    value = next(one for one in explained["sampling"] if one["name"] == "max_new_tokens")
    assert value["origin"] == "generation_config"
    explained = asked(server, COMPLETIONS, completion()).json[KEY]
    value = next(one for one in explained["sampling"] if one["name"] == "max_new_tokens")
    assert (value["value"], value["origin"], value["note"]) == (16, "default", "the API's own")


def test_a_completion(server: Server, llm: LLM) -> None:
    for prompt in ("A fire broke out in a", [65, 1966], ["A fire"]):
        body = completion(prompt, max_tokens=4)
        one = prompt[0] if prompt == ["A fire"] else prompt
        expected = llm.explain(one, {"max_new_tokens": 4})  # type: ignore[arg-type]
        assert asked(server, COMPLETIONS, body).json[KEY] == json.loads(json.dumps(expected.to_json()))


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(max_tokens=4)), (COMPLETIONS, completion())])
def test_a_stream(server: Server, path: str, body: dict[str, Any], options: Any) -> None:
    """Its chunks are those that come without, and one more before the end."""
    body = {**body, "stream_options": options, "stream": True}
    data = asked(server, path, body).data
    *events, last = [line.removeprefix(b"data: ") for line in data.splitlines() if line]
    assert last == b"[DONE]"
    *chunks, extra = map(json.loads, events)
    whole = asked(server, path, {**body, "stream": False}).json
    assert (extra["choices"], extra[KEY]) == ([], whole[KEY])
    assert {one["id"] for one in chunks} == {extra["id"]}
    plain = server.events(path, body)
    assert [one["choices"] for one in chunks] == [one["choices"] for one in plain]
    assert not any(KEY in one for one in chunks)


def test_the_served_length_is_reported(engine: Path) -> None:
    """Which may be less than the engine was built for."""
    served: Any = SimpleNamespace(limits=Ready(8, 1, 64), most_answers=1)
    found = ServedModel(TextSide.read("m", engine), served, GrammarChecks()).explained("Hi", {})
    assert (found.max_seq_len, found.room) == (64, 64 - found.num_prompt_tokens)


def test_what_is_refused(server: Server) -> None:
    several = completion(["a", "b"])
    unanswered = completion(max_tokens=0, echo=True)
    for path, body, header in (
        (CHAT, chat(), "yes"),
        (COMPLETIONS, several, "1"),
        (COMPLETIONS, unanswered, "1"),
        (COMPLETIONS, several | {"stream": True}, "1"),
    ):
        reply = asked(server, path, body, header)
        assert (reply.status, reply.error["param"]) == (400, "x-ingot-explain"), reply.data
    assert KEY not in asked(server, CHAT, chat(max_tokens=1), "0").json
    reply = asked(server, CHAT, chat("word " * 5000))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    variables = {"chat_template_kwargs": {"messages": []}}
    assert asked(server, CHAT, chat() | variables).status == 400
