"""Answers have the shapes of OpenAI's published schema, and streams keep their rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serve.client import Server
from tests.serve.conftest import MAX_SEQ_LEN, NAME, chat, completion
from tests.serve.published import Schema

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DRAWN = {"temperature": 0.8, "seed": 3}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3, **DRAWN},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 4},
    "logprobs alone": {"logprobs": True, "max_tokens": 4},
    "cut": {"max_completion_tokens": 2},
    "stop": {"stop": ["30"]},
    "usage": {"stream_options": {"include_usage": True}},
    "usage always": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2, **DRAWN},
    "prompts": {"prompt": ["A fire", "The fire"], "n": 2, "max_tokens": 3},
    "ids": {"prompt": [[1586, 1587], [65, 1966]], "max_tokens": 3},
    "logprobs": {"logprobs": 2, "max_tokens": 4},
    "echo": {"echo": True, "max_tokens": 3},
    "echo with logprobs": {"echo": True, "logprobs": 1, "max_tokens": 3},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "usage": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("values", CHATS.values(), ids=CHATS)
def test_a_chat_answer(server: Server, published: Schema, values: dict[str, Any]) -> None:
    reply = server.post(CHAT, chat(**values))
    assert reply.status == 200, reply.data
    published.check("CreateChatCompletionResponse", reply.json)
    assert len(reply.json["choices"]) == values.get("n", 1)


@pytest.mark.parametrize("values", CHATS.values(), ids=CHATS)
def test_chunks_of_a_chat(server: Server, published: Schema, values: dict[str, Any]) -> None:
    whole = server.post(CHAT, chat(**values)).json
    events = server.events(CHAT, chat(**values))
    for chunk in events:
        published.check("CreateChatCompletionStreamResponse", chunk)
    check_stream(events, values, whole["usage"])
    for answer in whole["choices"]:
        mine = [one for chunk in events for one in chunk["choices"] if one["index"] == answer["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in one["delta"] for one in mine[1:])
        assert "".join(one["delta"]["content"] for one in mine) == answer["message"]["content"]
        assert mine[-1]["finish_reason"] == answer["finish_reason"]
        if values.get("logprobs"):
            assert [e for one in mine for e in one["logprobs"]["content"]] == answer["logprobs"]["content"]
        else:
            assert {str(one["logprobs"]) for one in mine} == {str(answer["logprobs"])} == {"None"}


@pytest.mark.parametrize("values", PROMPTS.values(), ids=PROMPTS)
def test_completions(server: Server, published: Schema, values: dict[str, Any]) -> None:
    reply = server.post(COMPLETIONS, completion(**values))
    assert reply.status == 200, reply.data
    published.check("CreateCompletionResponse", without_first_logprobs(reply.json))
    prompts = values.get("prompt", ["one"])
    assert [one["index"] for one in reply.json["choices"]] == list(range(len(prompts) * values.get("n", 1)))


@pytest.mark.parametrize("values", PROMPTS.values(), ids=PROMPTS)
def test_chunks_of_completions(server: Server, published: Schema, values: dict[str, Any]) -> None:
    whole = server.post(COMPLETIONS, completion(**values)).json
    events = server.events(COMPLETIONS, completion(**values))
    for chunk in events:
        published.check("CreateCompletionResponse", with_a_reason(without_first_logprobs(chunk)))
    check_stream(events, values, whole["usage"])
    for answer in whole["choices"]:
        mine = [one for chunk in events for one in chunk["choices"] if one["index"] == answer["index"]]
        assert "".join(one["text"] for one in mine) == answer["text"]
        assert mine[-1]["finish_reason"] == answer["finish_reason"]
        for name, values_of in (answer["logprobs"] or {}).items():
            assert [v for one in mine for v in one["logprobs"][name]] == values_of


def check_stream(events: list[Any], values: dict[str, Any], usage: dict[str, int]) -> None:
    """One id, model and time; one finish reason for each choice, at its end; usage where it was asked for."""
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in events}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in events[:-1])
    options = values.get("stream_options", {})
    if options:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == usage
        before = [chunk.get("usage") for chunk in events[:-1]]
        if options.get("continuous_usage_stats"):
            counts = [one["completion_tokens"] for one in before]
            assert counts == sorted(counts)
            assert 1 <= counts[0] < counts[-1]  # a chunk has several tokens, where the server is late
            assert counts[-1] == usage["completion_tokens"]
        else:
            assert set(map(str, before)) == {"None"}
    else:
        assert all("usage" not in chunk for chunk in events)
    reasons: dict[int, list[str | None]] = {}
    for chunk in events:
        for choice in chunk["choices"]:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    for found in reasons.values():
        assert found[:-1] == [None] * (len(found) - 1)
        assert found[-1] in ("stop", "length")


def without_first_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without the nulls of an echoed prompt's first token, which the schema lacks."""
    choices = []
    for choice in answer["choices"]:
        lists = choice["logprobs"] and {
            name: [v for v in found if v is not None] for name, found in choice["logprobs"].items()
        }
        choices.append({**choice, "logprobs": lists})
    return {**answer, "choices": choices}


def with_a_reason(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk with a reason where a stream has null: the schema is that of full answers."""
    choices = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
    return {**chunk, "choices": choices}


def test_echoed_logprobs_belong_to_their_tokens(server: Server) -> None:
    (choice,) = server.post(COMPLETIONS, completion(echo=True, logprobs=1, max_tokens=3)).json["choices"]
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert "".join(lists["tokens"]) == choice["text"]
    ends = [*lists["text_offset"][1:], len(choice["text"])]
    cut = [choice["text"][a:b] for a, b in zip(lists["text_offset"], ends, strict=True)]
    assert cut == lists["tokens"]
    for token, logprob, top in list(zip(*list(lists.values())[:3], strict=True))[1:]:
        assert top[token] == logprob
        assert max(top.values()) >= logprob


def test_models(server: Server, published: Schema) -> None:
    found = server.get("/v1/models").json
    published.check("ListModelsResponse", found)
    (model,) = found["data"]
    assert model["id"] == NAME
    assert model["max_model_len"] == MAX_SEQ_LEN
    assert model["unproven"] is None
    assert server.get(f"/v1/models/{NAME}").json == model


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models/none", 404), ("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/health", 405)],
)
def test_errors_have_four_fields(
    server: Server, published: Schema, method: str, path: str, status: int
) -> None:
    reply = server.request(method, path)
    assert reply.status == status
    published.check("ErrorResponse", reply.json)
    assert reply.error["message"]


def test_the_schema_can_refuse(published: Schema, data: Path, server: Server) -> None:
    answer = server.post(CHAT, chat(max_tokens=1)).json
    for odd in ({"object": "chat"}, {"choices": [{}]}, {"created": "now"}):
        with pytest.raises(jsonschema.ValidationError):
            published.check("CreateChatCompletionResponse", {**answer, **odd})


def test_tokens_and_back(server: Server) -> None:
    found = server.post("/tokenize", {"model": NAME, "prompt": "A fire", "return_token_strs": True}).json
    assert found == {
        "count": 2,
        "max_model_len": MAX_SEQ_LEN,
        "tokens": [65, 1966],
        "token_strs": ["A", " fire"],
    }
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "A fire"}
    messages = server.post("/tokenize", {"messages": chat()["messages"]}).json
    used = server.post(CHAT, chat(max_tokens=1)).json["usage"]["prompt_tokens"]
    assert messages["count"] == len(messages["tokens"]) == used
    text = server.post("/detokenize", {"tokens": messages["tokens"]}).json["prompt"]
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_rest(server: Server) -> None:
    assert server.get("/health").json == {"status": "ok"}
    assert set(server.get("/version").json) == {"version"}
    assert server.metric("ingot_engine_proven") == 1
    names = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    before = [server.metric(f"ingot_{name}_count", model_name=NAME) for name in names]
    counters = ("ingot_prompt_tokens_total", "ingot_generation_tokens_total")
    tokens = [server.metric(name, model_name=NAME) for name in counters]
    usage = server.post(CHAT, chat(max_tokens=5, ignore_eos=True)).json["usage"]
    after = [server.metric(f"ingot_{name}_count", model_name=NAME) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 4]
    new = [server.metric(name, model_name=NAME) - old for name, old in zip(counters, tokens, strict=True)]
    assert new == [usage["prompt_tokens"], usage["completion_tokens"]]
    assert server.metric("ingot_kv_cache_usage_perc") < 0.5


def test_the_prefix_cache_is_counted(server: Server) -> None:
    names = ("ingot_prefix_cache_queries_total", "ingot_prefix_cache_hits_total")
    found = []
    for _ in range(2):
        before = [server.metric(name, model_name=NAME) for name in names]
        usage = server.post(COMPLETIONS, completion([1586] * 100, max_tokens=1)).json["usage"]
        after = [server.metric(name, model_name=NAME) for name in names]
        found.append([b - a for a, b in zip(before, after, strict=True)])
    assert usage["prompt_tokens"] == 100
    assert found == [[100, 0], [100, 64]]  # a block of 64
