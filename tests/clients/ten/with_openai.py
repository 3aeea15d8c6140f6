"""Ten calls of openai-python."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from calls import ANSWER, BASE, HELLO, MODEL, TOO_LONG, call, kind_of_error, main
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
chats = client.chat.completions
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
PARAMETERS |= {"additionalProperties": False}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=120)


@call
def chat() -> None:
    answer = chats.create(model=MODEL, messages=HELLO)
    assert ANSWER in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == sum((answer.usage.prompt_tokens, answer.usage.completion_tokens))


@call
def stream() -> None:
    chunks = list(
        chats.create(model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True})
    )
    assert ANSWER in "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 0


@call
def tools() -> None:
    answer = chats.create(model=MODEL, messages=HELLO, tools=[ADD], tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"a", "b"}  # type: ignore


@call
def tool_results() -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    first = chats.create(model=MODEL, messages=HELLO, tools=[ADD], tool_choice=choice).choices[0].message
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "85"}  # type: ignore
    developer: Any = {"role": "developer", "content": "Be brief."}
    talk = [developer, *HELLO, first, result]
    answer = chats.create(model=MODEL, messages=talk, tools=[ADD], max_tokens=32)
    assert answer.choices[0].message.content


@call
def tools_streamed() -> None:
    with chats.stream(model=MODEL, messages=HELLO, tools=[ADD], tool_choice="required") as events:
        final = events.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls
    assert set(calls[0].function.parsed_arguments) == {"a", "b"}


@call
def structured() -> None:
    answer = chats.parse(model=MODEL, messages=HELLO, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


@call
def logprobs() -> None:
    answer = chats.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3, n=2, temperature=1)
    for choice in answer.choices:
        assert choice.logprobs
        assert choice.logprobs.content
        assert [len(one.top_logprobs) for one in choice.logprobs.content][:1] == [3]
        text = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
        assert text.decode() == choice.message.content


@call
def embeddings() -> None:
    found = client.embeddings.create(model=MODEL, input=["one", "two", "one"]).data
    assert found[0].embedding == found[2].embedding != found[1].embedding


@call
def responses() -> None:
    response = client.responses.create(model=MODEL, input=HELLO, instructions="Be brief.")
    assert response.output_text
    with client.responses.stream(model=MODEL, input=HELLO, text_format=Person) as events:
        final = events.get_final_response()
    assert isinstance(final.output_parsed, Person)
    tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
    asked = client.responses.create(model=MODEL, input=HELLO, tools=[tool], tool_choice="required")
    calls = [item for item in asked.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": one.call_id, "output": "85"} for one in calls]
    assert calls
    talk: Any = [*HELLO, *asked.output, *results]
    assert client.responses.create(model=MODEL, input=talk, tools=[tool], max_output_tokens=32).output


@call
def errors() -> None:
    assert kind_of_error(lambda: chats.create(model="none", messages=HELLO)) == "NotFoundError"
    assert kind_of_error(lambda: chats.create(model=MODEL, messages=TOO_LONG)) == "BadRequestError"
    assert kind_of_error(lambda: chats.create(model=MODEL, messages=HELLO, n=1000)) == "BadRequestError"


main()
