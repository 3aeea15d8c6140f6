"""Ten calls of LiteLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from calls import ANSWER, BASE, HELLO, MODEL, TOO_LONG, call, kind_of_error, main
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
AT: dict[str, Any] = {"api_base": BASE, "api_key": "none", "num_retries": 0}
ASK: dict[str, Any] = {**AT, "model": f"openai/{MODEL}", "messages": HELLO}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
PARAMETERS |= {"additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=120)


@call
def chat() -> None:
    answer = litellm.completion(**ASK)
    assert ANSWER in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@call
def stream() -> None:
    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    assert ANSWER in "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert any(getattr(one, "usage", None) for one in chunks)


@call
async def asynchronous() -> None:
    parts = await litellm.acompletion(**ASK, stream=True)
    assert ANSWER in "".join([one.choices[0].delta.content or "" async for one in parts])


@call
def tools() -> None:
    choice = litellm.completion(**ASK, tools=[ADD], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"a", "b"}


@call
def tool_results() -> None:
    first = litellm.completion(**ASK, tools=[ADD], tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "85"}
    answer = litellm.completion(**ASK | {"messages": [*HELLO, first, result]}, tools=[ADD], max_tokens=32)
    assert answer.choices[0].message.content


@call
def structured() -> None:
    answer = litellm.completion(**ASK, response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content)


@call
def logprobs() -> None:
    answer = litellm.completion(**ASK, logprobs=True, top_logprobs=3, n=2, temperature=1)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert len(choice.logprobs.content[0].top_logprobs) == 3


@call
def embeddings() -> None:
    found = litellm.embedding(**AT, model=f"openai/{MODEL}", input=["one", "two", "one"]).data
    assert found[0]["embedding"] == found[2]["embedding"] != found[1]["embedding"]


@call
def responses() -> None:
    response = litellm.responses(**AT, model=f"openai/{MODEL}", input=HELLO, instructions="Be brief.")
    assert response.output[0].content[0].text
    events = list(litellm.responses(**AT, model=f"openai/{MODEL}", input="Hi", stream=True))
    assert events[-1].type == "response.completed"


@call
def errors() -> None:
    def ask(**values: Any) -> Any:
        return litellm.completion(**{**ASK, **values})

    assert kind_of_error(lambda: ask(model="openai/none")) == "NotFoundError"
    assert kind_of_error(lambda: ask(messages=TOO_LONG)) == "ContextWindowExceededError"
    assert kind_of_error(lambda: ask(n=1000)) == "BadRequestError"


main()
