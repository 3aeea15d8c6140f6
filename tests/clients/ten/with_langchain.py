"""Ten calls of LangChain (langchain-openai)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from calls import ANSWER, BASE, MODEL, TOO_LONG, call, kind_of_error, main
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

AT: dict[str, Any] = {"base_url": BASE, "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model=MODEL, **AT)
QUESTION = "How much is 27 + 58?"


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ann", "Bob"]
    age: Annotated[int, Field(ge=0, le=120)]


@tool
def add(a: Annotated[int, Field(ge=0, le=99)], b: Annotated[int, Field(ge=0, le=99)]) -> int:
    """Add two numbers."""
    return a + b


@call
def chat() -> None:
    answer = model.invoke(QUESTION)
    assert ANSWER in answer.text
    usage = answer.usage_metadata
    assert usage
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@call
def stream() -> None:
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert ANSWER in "".join(one.text for one in chunks)
    assert any(one.usage_metadata for one in chunks)


@call
async def batches() -> None:
    found = await model.abatch([QUESTION] * 4)
    assert len({one.text for one in found}) == 1


@call
def tools() -> None:
    answer = model.bind_tools([add], tool_choice="required", strict=True).invoke(QUESTION)
    assert set(answer.tool_calls[0]["args"]) == {"a", "b"}


@call
def tool_results() -> None:
    asked = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    first = model.bind_tools([add], tool_choice="add").invoke(asked)
    (one,) = first.tool_calls
    result = ToolMessage(str(add.invoke(one["args"])), tool_call_id=one["id"])
    assert model.bind_tools([add]).invoke([*asked, first, result], max_tokens=32).text
    agent = create_agent(model, [add])
    assert agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].text


@call
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Person, method=method).invoke(QUESTION)
        assert isinstance(found, Person)


@call
def logprobs() -> None:
    found = model.bind(logprobs=True, top_logprobs=3).invoke(QUESTION)
    assert len(found.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 3


@call
def embeddings() -> None:
    made = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **AT)
    one, two, again = made.embed_documents(["one", "two", "one"])
    assert one == again != two


@call
def responses() -> None:
    by_responses = ChatOpenAI(model=MODEL, use_responses_api=True, **AT)
    assert by_responses.invoke(QUESTION, max_tokens=48).text
    assert "".join(one.text for one in by_responses.stream(QUESTION, max_tokens=48))
    assert isinstance(by_responses.with_structured_output(Person).invoke(QUESTION), Person)


@call
def errors() -> None:
    assert kind_of_error(lambda: ChatOpenAI(model="none", **AT).invoke(QUESTION)).endswith("NotFoundError")
    assert kind_of_error(lambda: model.invoke(TOO_LONG)).endswith(("BadRequestError", "InvalidRequestError"))


main()
