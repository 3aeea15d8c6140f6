"""Ten calls of the Agents SDK (openai-agents), by both of OpenAI's APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from agents import (
    Agent,
    AsyncOpenAI,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from calls import BASE, MODEL, call, main
from pydantic import BaseModel, Field

set_tracing_disabled(True)
QUESTION = "How much is 27 + 58?"
SHORT = ModelSettings(max_tokens=48)
added: list[tuple[int, int]] = []


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Annotated[int, Field(ge=0, le=120)]


@function_tool
def add(a: Annotated[int, Field(ge=0, le=99)], b: Annotated[int, Field(ge=0, le=99)]) -> int:
    """Add two numbers."""
    added.append((a, b))
    return a + b


def by(kind: type[Any]) -> Model:
    model: Model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0))
    return model


async def text(kind: type[Any]) -> None:
    agent = Agent(name="a", instructions="Be brief.", model=by(kind), model_settings=SHORT)
    found = await Runner.run(agent, QUESTION)
    assert found.final_output
    usage = found.context_wrapper.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


async def streamed(kind: type[Any]) -> None:
    run = Runner.run_streamed(Agent(name="a", model=by(kind), model_settings=SHORT), QUESTION)
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds
    assert run.final_output


async def tool(kind: type[Any]) -> None:
    """The first turn must call; the SDK leaves the second to the model."""
    added.clear()
    settings = ModelSettings(tool_choice="required", max_tokens=1000, parallel_tool_calls=False)
    agent = Agent(name="a", model=by(kind), tools=[add], model_settings=settings)
    found = await Runner.run(agent, QUESTION)
    assert len(added) == 1
    assert found.final_output is not None


async def structured(kind: type[Any]) -> None:
    found = await Runner.run(Agent(name="a", model=by(kind), output_type=Person), QUESTION)
    assert isinstance(found.final_output, Person)


@call
async def responses() -> None:
    await text(OpenAIResponsesModel)


@call
async def chat() -> None:
    await text(OpenAIChatCompletionsModel)


@call
async def responses_streamed() -> None:
    await streamed(OpenAIResponsesModel)


@call
async def chat_streamed() -> None:
    await streamed(OpenAIChatCompletionsModel)


@call
async def tools_of_responses() -> None:
    await tool(OpenAIResponsesModel)


@call
async def tools_of_chat() -> None:
    await tool(OpenAIChatCompletionsModel)


@call
async def structured_by_responses() -> None:
    await structured(OpenAIResponsesModel)


@call
async def structured_by_chat() -> None:
    await structured(OpenAIChatCompletionsModel)


@call
async def two_turns() -> None:
    """The whole conversation goes back, as items and from a session."""
    agent = Agent(name="a", model=by(OpenAIResponsesModel), model_settings=SHORT)
    first = await Runner.run(agent, QUESTION)
    again: Any = [*first.to_input_list(), {"role": "user", "content": "And 3 more?"}]
    assert (await Runner.run(agent, again)).final_output
    session = SQLiteSession("talk")
    for question in (QUESTION, "And 3 more?"):
        assert (await Runner.run(agent, question, session=session)).final_output


@call
async def errors() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
        agent = Agent(name="a", model=kind(model="none", openai_client=client))  # type: ignore[operator]
        found = None
        try:
            await Runner.run(agent, QUESTION)
        except Exception as error:
            found = type(error).__name__
        assert found == "NotFoundError"


main()
