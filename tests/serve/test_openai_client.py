"""OpenAI's own client against the server: answers, streams, errors, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.client import PATIENCE, Server, wait_for
from tests.serve.conftest import NAME, TOOLS, chat
from tests.serve.test_tools import ADD

CHAT: Any = chat()


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )


def aclient(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )


def test_answers_and_streams_are_the_same(server: Server) -> None:
    with client(server) as api:
        whole = api.chat.completions.create(**CHAT, logprobs=True)
        *chunks, last = api.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        assert whole.choices[0].logprobs is not None
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content == "12 + 30 = 42."
        assert last.usage == whole.usage
        assert [one.id for one in api.models.list()] == [NAME]
        assert api.models.retrieve(NAME).owned_by == "ingot"
        completion = api.completions.create(model=NAME, prompt=["A fire", "The fire"], n=2, max_tokens=4)
        pieces = list(
            api.completions.create(model=NAME, prompt=["A fire", "The fire"], n=2, max_tokens=4, stream=True)
        )
        for choice in completion.choices:
            mine = [c.text for piece in pieces for c in piece.choices if c.index == choice.index]
            assert "".join(mine) == choice.text


def test_extras_reach_the_engine(server: Server) -> None:
    with client(server) as api:
        extra = {"ignore_eos": True, "min_tokens": 3, "top_k": 1, "stop_token_ids": []}
        answer = api.chat.completions.create(**CHAT, max_tokens=20, extra_body=extra)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("values", "kind", "code"),
    [
        ({"model": "none"}, openai.NotFoundError, "model_not_found"),
        (
            {"messages": [{"role": "user", "content": "a b " * 2000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"n": 0}, openai.BadRequestError, None),
        ({"stream": True, "max_tokens": 4000}, openai.BadRequestError, "context_length_exceeded"),
    ],
    ids=["model", "long", "n", "stream"],
)
def test_errors_are_the_clients_own_types(
    server: Server, values: Any, kind: type[openai.APIStatusError], code: str
) -> None:
    with client(server) as api, pytest.raises(kind) as caught:
        api.chat.completions.create(**{**CHAT, **values})
    assert caught.value.code == code
    assert caught.value.type
    assert str(caught.value)


@pytest.mark.slow
def test_it_assembles_streamed_calls(tool_server: Server) -> None:
    """Its own accumulator assembles the call of the full answer; and it parses a form into an object."""
    asked: Any = {**CHAT, "model": TOOLS, "tools": [ADD], "tool_choice": "required", "max_tokens": 150}
    with client(tool_server) as api:
        (whole,) = api.chat.completions.create(**asked, parallel_tool_calls=False).choices
        with api.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
            kinds = {event.type for event in stream}
            (found,) = stream.get_final_completion().choices
        assert "tool_calls.function.arguments.done" in kinds
        assert whole.message.tool_calls
        assert found.message.tool_calls
        assert found.message.tool_calls[0].function.name == "add"
        expected: Any = whole.message.tool_calls[0]
        assert found.message.tool_calls[0].function.arguments == expected.function.arguments
        assert found.finish_reason == whole.finish_reason == "tool_calls"
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        parsed = api.chat.completions.parse(
            **{**CHAT, "model": TOOLS}, response_format=Verdict, max_tokens=100, extra_body=quiet
        )
        assert isinstance(parsed.choices[0].message.parsed, Verdict)


class Verdict(BaseModel):
    """A form that a program reads."""

    ok: bool


def test_many_tasks(server: Server) -> None:
    async def ask(api: openai.AsyncOpenAI, text: str) -> str | None:
        body: Any = chat(text)
        return (await api.chat.completions.create(**body)).choices[0].message.content

    async def main() -> list[str | None]:
        async with aclient(server) as api:
            return await asyncio.gather(*(ask(api, f"What is {i} + 30?") for i in range(12)))

    assert asyncio.run(main()) == [f"{i} + 30 = {i + 30}." for i in range(12)]


def test_a_task_that_is_cancelled_frees_its_place(server: Server) -> None:
    async def main() -> None:
        async with aclient(server) as api:
            stream = await api.chat.completions.create(
                **CHAT, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            asking = asyncio.create_task(
                api.chat.completions.create(**CHAT, max_tokens=400, extra_body={"ignore_eos": True})
            )
            await asyncio.to_thread(wait_for, "it to run", lambda: not server.idle())
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert asking.cancelled()

    asyncio.run(main())
    wait_for("its place to be free", server.idle)
