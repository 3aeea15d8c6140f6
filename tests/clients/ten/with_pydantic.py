"""Ten calls of pydantic-ai."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from calls import ANSWER, BASE, MODEL, call, main
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE, api_key="none")
chat_model = OpenAIChatModel(MODEL, provider=provider)
responses_model = OpenAIResponsesModel(MODEL, provider=provider)
QUESTION = "How much is 27 + 58?"
SHORT: Any = {"max_tokens": 48}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Annotated[int, Field(ge=0, le=120)]


@call
def chat() -> None:
    found = Agent(chat_model).run_sync(QUESTION)
    assert ANSWER in found.output
    usage: Any = found.usage() if callable(found.usage) else found.usage
    assert usage.input_tokens > 0 < usage.output_tokens


@call
async def stream() -> None:
    async with Agent(chat_model).run_stream(QUESTION) as found:
        parts = [one async for one in found.stream_text(delta=True, debounce_by=None)]
    assert ANSWER in "".join(parts)


@call
def instructions() -> None:
    agent = Agent(chat_model, instructions="Be brief.", system_prompt="Be kind.", model_settings=SHORT)
    assert agent.run_sync(QUESTION).output


@call
def tools() -> None:
    """A result that must come by a call: the model is asked for one of the tools."""
    found = Agent(chat_model, output_type=Person).run_sync(QUESTION)
    assert isinstance(found.output, Person)


@call
async def tools_streamed() -> None:
    async with Agent(chat_model, output_type=Person).run_stream(QUESTION) as found:
        assert isinstance(await found.get_output(), Person)


@call
def structured() -> None:
    found = Agent(chat_model, output_type=NativeOutput(Person)).run_sync(QUESTION)
    assert isinstance(found.output, Person)


@call
def two_turns() -> None:
    agent = Agent(chat_model, model_settings=SHORT)
    first = agent.run_sync(QUESTION)
    assert agent.run_sync("And 3 more?", message_history=first.all_messages()).output


@call
def responses() -> None:
    first = Agent(responses_model, instructions="Be brief.", model_settings=SHORT).run_sync(QUESTION)
    assert first.output
    again = Agent(responses_model, output_type=NativeOutput(Person)).run_sync(
        QUESTION, message_history=first.all_messages()
    )
    assert isinstance(again.output, Person)


@call
async def responses_streamed() -> None:
    async with Agent(responses_model, output_type=Person).run_stream(QUESTION) as found:
        assert isinstance(await found.get_output(), Person)


@call
def errors() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        status = 0
        try:
            Agent(kind("none", provider=provider)).run_sync(QUESTION)
        except ModelHTTPError as error:
            status = error.status_code
        assert status == 404


main()
