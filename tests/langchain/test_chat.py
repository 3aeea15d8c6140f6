"""ChatIngot answers as ``LLM.chat`` does, and refuses what the engine does not take."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
)
from langchain_core.prompts import ChatPromptTemplate
from pydantic import ValidationError

from ingot import LLM, RuntimeConfig, SamplingParams
from ingot.adapters.langchain.langchain_messages import as_conversation
from ingot.errors import CheckpointError, RequestError
from ingot.langchain import ChatIngot
from tests.e2e.tiny import write_tiny
from tests.e2e.watch import check_idle

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
SUMS = [f"What is {n} + 30?" for n in range(10, 22)]
STORY = "Tell me a short story about a fox."


@pytest.fixture
def chat(pocket: LLM) -> ChatIngot:
    return ChatIngot(model=pocket, model_name="pocket", max_tokens=24, temperature=0)


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def test_an_answer_with_its_usage_and_ending(chat: ChatIngot, pocket: LLM) -> None:
    expected = pocket.chat(SUM, max_new_tokens=24, temperature=0)
    message = chat.invoke("What is 12 + 30?")
    assert message.text == expected.text == "12 + 30 = 42."
    sent, got = len(pocket.chat_ids(SUM)), len(expected.token_ids)
    assert message.usage_metadata == {"input_tokens": sent, "output_tokens": got, "total_tokens": sent + got}
    ending = {"finish_reason": "stop", "model_name": "pocket", "model_provider": "ingot"}
    assert message.response_metadata == ending
    assert chat.invoke(STORY, max_tokens=3).response_metadata["finish_reason"] == "length"


def test_all_ways_to_ask_give_the_same(chat: ChatIngot) -> None:
    async def asked() -> list[AIMessage]:
        streamed = [chunk async for chunk in chat.astream(STORY)]
        return [await chat.ainvoke(STORY), merged(streamed), *(await chat.abatch([STORY]))]

    expected = chat.invoke(STORY)
    streamed = list(chat.stream(STORY))
    assert len(streamed) > 5
    found = [merged(streamed), *chat.batch([STORY]), *asyncio.run(asked())]
    for message in found:
        assert message.text == expected.text
        assert message.usage_metadata == expected.usage_metadata
        assert message.response_metadata == expected.response_metadata


def test_it_is_part_of_a_chain(chat: ChatIngot) -> None:
    prompt = ChatPromptTemplate([("system", "Be brief."), ("human", "What is {a} + {b}?")])
    assert "42" in (prompt | chat).invoke({"a": 12, "b": 30}).text


def widest_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[most requests that one step had], from now on."""
    run, most = llm.executor.runner.run, [0]

    def seen(step: Any) -> Any:
        most[0] = max(most[0], len(step.requests))
        return run(step)

    monkeypatch.setattr(llm.executor.runner, "run", seen)
    monkeypatch.setattr(llm.executor, "run_ahead", False)
    return most


def test_a_batch_is_in_flight_together(chat: ChatIngot, pocket: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [chat.invoke(text).text for text in SUMS]
    most = widest_step(pocket, monkeypatch)
    # More than Python's default pool has threads here: each has one conversation.
    assert [m.text for m in chat.batch(SUMS)] == alone
    assert most[0] > 6
    most[0] = 0
    assert [m.text for m in asyncio.run(chat.abatch(SUMS))] == alone
    assert most[0] == min(len(SUMS), pocket.executor.max_batch_size)
    most[0] = 0
    chat.batch(SUMS[:4], {"max_concurrency": 1})
    assert most[0] == 1


def test_a_failed_one_of_a_batch_is_returned(chat: ChatIngot) -> None:
    good, bad = chat.batch([SUMS[0], []], return_exceptions=True)
    assert isinstance(good, AIMessage)
    assert isinstance(bad, RequestError)


def test_stop_words_of_the_model_and_of_a_call(chat: ChatIngot, pocket: LLM) -> None:
    assert chat.invoke("What is 12 + 30?", stop=["="]).text == "12 + 30 "
    stopping = chat.model_copy(update={"stop": ["="]})
    assert stopping.invoke("What is 12 + 30?").text == "12 + 30 "
    assert stopping.invoke("What is 12 + 30?", stop=["+"]).text == "12 "
    assert merged(list(chat.stream("What is 12 + 30?", stop=["= 4"]))).text == "12 + 30 "


def test_sampling_values_reach_the_engine(pocket: LLM) -> None:
    values = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 3}
    chat = ChatIngot(model=pocket, max_tokens=16, **values)
    expected = pocket.chat([{"role": "user", "content": STORY}], max_new_tokens=16, **values).text
    assert chat.invoke(STORY).text == expected
    params = chat._params(None, {"min_p": 0.1, "temperature": 0.5, "max_new_tokens": 5})
    changes = {"min_p": 0.1, "temperature": 0.5, "max_new_tokens": 5}
    assert params == pocket.default_params.replace(**values | changes)
    based = ChatIngot(model=pocket, params=SamplingParams(repetition_penalty=1.3), top_p=0.5)
    assert based._params(None, {}) == SamplingParams(repetition_penalty=1.3, top_p=0.5)
    assert ChatIngot(model=pocket)._params(None, {}) == pocket.default_params


def test_logprobs_if_asked(chat: ChatIngot, pocket: LLM) -> None:
    expected = pocket.chat(SUM, max_new_tokens=24, temperature=0, logprobs=2).logprobs
    assert expected is not None
    message = chat.invoke("What is 12 + 30?", logprobs=True, top_logprobs=2)
    content = message.response_metadata["logprobs"]["content"]
    assert [(e["token_id"], e["logprob"]) for e in content] == [(e.token_id, e.logprob) for e in expected]
    tops = [[(t["token_id"], t["logprob"]) for t in e["top_logprobs"]] for e in content]
    assert tops == [list(e.top) for e in expected]
    assert "".join(e["token"] for e in content) == message.text
    streamed = merged(list(chat.stream("What is 12 + 30?", logprobs=True)))
    found = streamed.response_metadata["logprobs"]["content"]
    assert [e["token_id"] for e in found] == [e["token_id"] for e in content]
    assert all(e["top_logprobs"] == [] for e in found)
    assert "logprobs" not in chat.invoke("What is 12 + 30?").response_metadata
    always = chat.model_copy(update={"top_logprobs": 2})
    assert always.invoke("What is 12 + 30?").response_metadata["logprobs"]["content"] == content
    assert "logprobs" not in always.invoke("What is 12 + 30?", logprobs=False).response_metadata
    assert ChatIngot(model=pocket, params=SamplingParams(logprobs=3))._params(None, {}).logprobs == 3


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends += 1


def test_callbacks_get_each_piece(chat: ChatIngot, pocket: LLM) -> None:
    streaming = ChatIngot(model=pocket, max_tokens=24, temperature=0, streaming=True)

    async def asked(config: Any) -> str:
        return "".join([chunk.text async for chunk in chat.astream(STORY, config)])

    for ask in (
        lambda config: merged(list(chat.stream(STORY, config))).text,
        lambda config: streaming.invoke(STORY, config).text,
        lambda config: asyncio.run(asked(config)),
        lambda config: asyncio.run(streaming.ainvoke(STORY, config)).text,
    ):
        handler = Tokens()
        text = ask({"callbacks": [handler]})
        assert len(handler.tokens) > 5
        assert "".join(handler.tokens) == text
        assert handler.ends == 1


def test_several_answers(chat: ChatIngot, pocket: LLM) -> None:
    result = chat.generate([[HumanMessage(STORY)]], n=2, temperature=1.0, seed=1, max_tokens=8)
    texts = [one.text for one in result.generations[0]]
    values = {"n": 2, "temperature": 1.0, "seed": 1, "max_new_tokens": 8}
    output = pocket.chat([{"role": "user", "content": STORY}], **values)
    assert texts == [answer.text for answer in output.answers]
    with pytest.raises(RequestError, match="a stream has one answer; seen: n=2"):
        list(chat.stream(STORY, n=2))


def test_a_dropped_stream_and_a_cancelled_task_end_their_requests(pocket: LLM) -> None:
    chat = ChatIngot(model=pocket, max_tokens=900, params=SamplingParams(ignore_eos=True))

    async def cancelled() -> None:
        task = asyncio.create_task(chat.ainvoke(STORY))
        while not pocket.executor.has_work:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stream = chat.stream(STORY)
    next(stream)
    stream.close()
    asyncio.run(cancelled())
    end = time.monotonic() + 10
    while pocket.executor.has_work and time.monotonic() < end:
        time.sleep(0.01)
    check_idle(pocket)


def test_threads_share_one_model(chat: ChatIngot) -> None:
    expected = [chat.invoke(text).text for text in SUMS[:4]]
    found: dict[int, str] = {}

    def ask(place: int) -> None:
        found[place] = "".join(chunk.text for chunk in chat.stream(SUMS[place]))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == expected


def test_tokens_are_the_engines(chat: ChatIngot, pocket: LLM) -> None:
    text = "Why is the sky blue?"
    assert pocket.tokenizer is not None
    assert chat.get_token_ids(text) == pocket.tokenizer.encode(text, add_special_tokens=False)
    assert chat.get_num_tokens_from_messages([HumanMessage("What is 12 + 30?")]) == len(pocket.chat_ids(SUM))


def test_messages_become_a_conversation() -> None:
    messages = [
        SystemMessage("a"),
        SystemMessage("b"),
        HumanMessage([{"type": "text", "text": "c"}, "d"], name="Marta"),
        AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "e"}]),
        ChatMessage("f", role="user"),
    ]
    assert as_conversation(messages) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "the conversation is empty"),
        ([HumanMessage([PICTURE])], "message 1: this engine takes text only; seen: a content block of type"),
        ([HumanMessage("a"), FunctionMessage("b", name="f")], "message 2: functions are not taken"),
        ([ChatMessage("a", role="referee")], "referee"),
    ],
)
def test_messages_that_are_refused(chat: ChatIngot, messages: list[BaseMessage], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat.invoke(messages)
    with pytest.raises(RequestError, match=words):
        list(chat.stream(messages))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1}, "unknown sampling parameter; seen: temprature.*did you mean temperature"),
        ({"top_p": 0}, "top_p is out of range"),
        ({"model": "other"}, "the model of a call cannot be changed; seen: other"),
        ({"top_logprobs": 21}, "logprobs is out of range; seen: 21"),
    ],
)
def test_values_of_a_call_that_are_refused(chat: ChatIngot, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat.invoke("Hi", **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, "temperature is out of range"),
        ({"timeout": 3}, "timeout"),
        ({"stop": [""]}, "a stop string must be non-empty"),
        ({"model": None}, "no engine was given"),
        ({"llm": "engines/other"}, "model and llm are the same argument"),
        ({"model": 3}, "instance of LLM"),
    ],
)
def test_values_of_the_model_that_are_refused(pocket: LLM, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ChatIngot(**{"model": pocket} | values)


def test_it_opens_a_folder_and_calls_itself_after_it(tmp_path: Any) -> None:
    folder = write_tiny(tmp_path / "little")
    chat = ChatIngot(model=str(folder), max_tokens=2)
    assert chat.model_name == "little"
    assert chat.invoke("Hi").usage_metadata["output_tokens"] <= 2
    assert ChatIngot(llm=chat.llm).model_name == "qwen"
    with pytest.raises(CheckpointError):
        ChatIngot(model=str(tmp_path / "none"))


def test_a_cache_knows_engines_and_values_apart(chat: ChatIngot, tmp_path: Any) -> None:
    folder = write_tiny(tmp_path / "little")
    runtime = RuntimeConfig(cache_tokens=256)
    one, other = (ChatIngot(model=LLM(folder, "cpu", runtime=runtime)) for _ in range(2))
    keys = {c._get_llm_string() for c in (chat, one, other, chat.model_copy(update={"seed": 1}))}
    assert len(keys) == 4
    assert chat._get_llm_string() == chat.model_copy()._get_llm_string()
