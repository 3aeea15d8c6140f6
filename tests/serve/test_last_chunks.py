"""The last chunk of every kind of stream, where the token that ends the answer has no text; metrics."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from ingot.serve.engine_calls.process_protocol import Add, Gauges, News, StepNews
from tests.serve.test_every_stream import (
    MESSAGES,
    POCKET,
    TextSide,
    chat,
    completion,
    read,
    response,
    run,
    served,
    simple,
    until,
)

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SO_FAR = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KINDS: dict[str, Any] = {
    "chat": lambda n: chat(n, **USAGE),
    "chat with usage so far": lambda n: chat(n, **SO_FAR),
    "chat with logprobs": lambda n: chat(n, logprobs=True, **USAGE),
    "completion": lambda n: completion(n, **USAGE),
    "completion with usage so far": lambda n: completion(n, **SO_FAR),
    "completion with logprobs": lambda n: completion(n, logprobs=1, **USAGE),
    "response": lambda n: response(1),
    "simple chat": lambda n: simple(1),
}


@pytest.fixture(scope="module")
def side() -> TextSide:
    return TextSide.read("m", POCKET)


def streamed(side: TextSide, kind: str, n: int, reason: str) -> tuple[list[Any], list[int], int]:
    """The events; then the lengths of the prompts, and how many answers there are."""
    events: list[bytes] = []
    lengths: list[int] = []
    answers = 0

    async def main() -> None:
        nonlocal answers
        async with served(side) as (engine, model):
            task = asyncio.create_task(read(KINDS[kind](n)(model), stream=True, into=events))
            await until(lambda: engine.asked(Add))
            added = engine.asked(Add)
            lengths.extend(len(one.prompt_ids) for one in added)
            answers = sum(one.params["n"] for one in added)
            engine.token()
            engine.token()
            for one in added:
                for index in range(one.params["n"]):
                    engine.step(News(one.id, index, (), reason))  # type: ignore[arg-type]
            await task

    run(main)
    lines = b"".join(events).splitlines()  # an event with log-probabilities may come in parts
    data = [line[6:] for line in lines if line.startswith(b"data: ")]
    return [one if one == b"[DONE]" else json.loads(one) for one in data], lengths, answers


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("chat", "completion"))])
def test_each_choice_says_why_it_ended_and_the_last_chunk_what_it_took(
    side: TextSide, kind: str, reason: str, n: int
) -> None:
    (*chunks, total, done), lengths, answers = streamed(side, kind, n, reason)
    assert done == b"[DONE]"
    assert answers == n * len(lengths) == n * (1 if kind.startswith("chat") else 2)
    found: dict[int, list[str | None]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert found == {index: [None, None, reason] for index in range(answers)}
    usage = {"prompt_tokens": sum(lengths), "completion_tokens": 2 * answers}
    usage["total_tokens"] = sum(usage.values())
    assert (total["choices"], total["usage"]) == ([], usage)
    assert {name: total[name] for name in ("id", "object", "created", "model")} == {
        name: chunks[0][name] for name in ("id", "object", "created", "model")
    }
    if "so far" in kind:
        assert [one["usage"] for one in chunks[-answers:]] == [usage] * answers
    elif kind.startswith("chat"):
        assert [one["usage"] for one in chunks] == [None] * len(chunks)
    else:
        assert not any("usage" in one for one in chunks)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_the_last_event_of_a_response_is_the_response(side: TextSide, reason: str, status: str) -> None:
    events, (length,), _ = streamed(side, "response", 1, reason)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
    assert last["response"]["usage"] | {"input_tokens_details": None, "output_tokens_details": None} == {
        "input_tokens": length,
        "output_tokens": 2,
        "total_tokens": length + 2,
        "input_tokens_details": None,
        "output_tokens_details": None,
    }
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert text
    assert last["response"]["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_event_of_a_simple_chat_has_the_history(side: TextSide, reason: str) -> None:
    (*events, last), _, _ = streamed(side, "simple chat", 1, reason)
    text = "".join(one["delta"] for one in events)
    assert text
    assert [one["finished"] for one in events] == [False] * len(events)
    assert (last["finished"], last["delta"], last["response"]) == (True, "", text)
    assert (last["history"], last["status"]) == ([[MESSAGES[0]["content"], text]], 200)
    assert last["time"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_metrics_count_what_a_request_took(side: TextSide, kind: str, reason: str, n: int) -> None:
    """Each name once, under the model's label; a step's gauges are totals, of which the growth is counted."""
    counted: dict[str, float | None] = {}

    async def main() -> None:
        async with served(side) as (engine, model):
            task = asyncio.create_task(read(KINDS[kind](n)(model), stream=True, into=[]))
            await until(lambda: engine.asked(Add))
            engine.token()
            engine.token()
            for one in engine.asked(Add):
                news = [News(one.id, index, (), reason) for index in range(n)]  # type: ignore[arg-type]
                engine.client._receive(StepNews(news, [], Gauges(3, 4, 0.25, 20, 8)))
            engine.client._receive(StepNews([], [], Gauges(1, 2, 0.5, 25, 9)))
            await task
            engine.client.metrics.count_audio_seconds(2.5)
            metrics, lengths = engine.metrics, [len(one.prompt_ids) for one in engine.asked(Add)]
            metrics.of("m").state(engine.client.gauges, proven=True, alive=True)
            read_of = partial(metrics.registry.get_sample_value, labels={"model_name": "m"})
            counted.update({name: read_of(f"ingot_{name}") for name in expected(lengths)})
            labels = {"model_name": "m", "finished_reason": reason}
            ended = metrics.registry.get_sample_value("ingot_request_success_total", labels)
            assert ended == n * len(lengths)
            assert counted == expected(lengths)
            metrics.of("m").state(engine.client.gauges, proven=False, alive=False)
            gone = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_alive")
            assert [read_of(f"ingot_{name}") for name in (*gone, "engine_proven")] == [0] * 5

    def expected(lengths: list[int]) -> dict[str, float]:
        answers = n * len(lengths)
        return {
            "prompt_tokens_total": sum(lengths),
            "generation_tokens_total": 2 * answers,
            "e2e_request_latency_seconds_count": len(lengths),
            "time_to_first_token_seconds_count": 1,
            "inter_token_latency_seconds_count": answers,
            "prefix_cache_queries_total": 25,
            "prefix_cache_hits_total": 9,
            "audio_requests_total": 1,
            "audio_seconds_total": 2.5,
            "engine_restarts_total": 0,
            "num_requests_running": 1,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.5,
            "engine_proven": 1,
            "engine_alive": 1,
        }

    run(main)
