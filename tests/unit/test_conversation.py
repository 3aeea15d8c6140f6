"""A conversation's memory: what it keeps, drops, and has after an error or a stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm.conversation import Conversation
from ingot.llm.outputs import Piece

Messages = Sequence[Mapping[str, str]]


class FakeLLM:
    """Answers ``re: question`` letter by letter; a message takes as many tokens as its letters."""

    def __init__(self, max_seq_len: int = 1000) -> None:
        self.executor = SimpleNamespace(max_seq_len=max_seq_len)
        self.default_params = SamplingParams(max_new_tokens=10)
        self.asked: list[Messages] = []
        self.closed = 0

    def chat_ids(self, messages: Messages) -> list[int]:
        return [0] * sum(len(m["content"]) for m in messages)

    def stream(self, messages: Messages, params: SamplingParams) -> Iterator[Piece]:
        if len(self.chat_ids(messages)) >= self.executor.max_seq_len:
            raise RequestError("the prompt is too long")
        self.asked.append(messages)
        return self._pieces("re: " + messages[-1]["content"])

    def _pieces(self, answer: str) -> Iterator[Piece]:
        try:
            for letter in answer:
                if letter == "!":
                    raise RequestError("broken")
                yield Piece(letter)
        finally:
            self.closed += 1


def talk(llm: FakeLLM, **values: Any) -> Conversation:
    return Conversation(llm, **values)  # type: ignore[arg-type]


def said(messages: Messages) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}" for m in messages]


def test_each_question_sees_the_turns_before() -> None:
    llm = FakeLLM()
    chat = talk(llm, system="S")
    assert "".join(p.text for p in chat.ask("a")) == "re: a"
    list(chat.ask("b"))
    assert said(llm.asked[1]) == ["s:S", "u:a", "a:re: a", "u:b"]
    chat.system = "T"
    chat.clear()
    list(chat.ask("c"))
    assert said(llm.asked[2]) == ["s:T", "u:c"]
    assert said(talk(llm).messages("x")) == ["u:x"]


def test_a_stopped_answer_is_kept_up_to_there() -> None:
    llm = FakeLLM()
    chat = talk(llm)
    pieces = chat.ask("abc")
    assert next(pieces).text + next(pieces).text == "re"
    pieces.close()  # type: ignore[attr-defined]
    assert chat.turns == [("abc", "re")]
    assert llm.closed == 1


def test_a_failed_answer_is_kept_up_to_there() -> None:
    chat = talk(FakeLLM())
    with pytest.raises(RequestError):
        list(chat.ask("a!"))
    assert chat.turns == [("a!", "re: a")]


def test_a_refused_question_changes_nothing() -> None:
    chat = talk(FakeLLM(max_seq_len=60))
    list(chat.ask("one"))
    with pytest.raises(RequestError, match="too long"):
        list(chat.ask("x" * 60))
    assert chat.turns == [("one", "re: one")]
    assert chat.num_dropped == 0


def test_the_oldest_turns_are_dropped_when_room_runs_out() -> None:
    llm = FakeLLM(max_seq_len=60)
    chat = talk(llm)
    list(chat.ask("a" * 10))  # 24 letters with its answer
    list(chat.ask("b" * 5))  # 14
    assert chat.num_dropped == 0
    list(chat.ask("c" * 12))  # 24 + 14 + 12 = 50 leave the 10 that an answer may take
    assert chat.num_dropped == 0
    list(chat.ask("d"))
    assert [m["content"][0] for m in llm.asked[-1]] == ["b", "r", "c", "r", "d"]
    assert chat.num_dropped == 1
    assert [question[0] for question, _ in chat.turns] == ["b", "c", "d"]


def test_room_for_an_answer_is_at_most_a_quarter() -> None:
    llm = FakeLLM(max_seq_len=40)
    chat = talk(llm, params=SamplingParams(max_new_tokens=None))
    list(chat.ask("a" * 10))
    list(chat.ask("b" * 6))  # 24 + 6 = 30
    assert chat.num_dropped == 0
    list(chat.ask("c"))
    assert chat.num_dropped == 1


def test_retry_takes_the_place_of_the_last_answer() -> None:
    llm = FakeLLM()
    chat = talk(llm)
    for text in ("a", "b"):
        list(chat.ask(text))
    list(chat.retry())
    assert said(llm.asked[2]) == said(llm.asked[1]) == ["u:a", "a:re: a", "u:b"]
    assert chat.turns == [("a", "re: a"), ("b", "re: b")]
    chat.clear()
    with pytest.raises(RequestError, match="no message to answer again"):
        list(chat.retry())


def test_a_retry_that_fails_leaves_the_old_answer_and_can_be_tried_again() -> None:
    llm = FakeLLM()
    chat = talk(llm)
    for text in ("a", "b"):
        list(chat.ask(text))
    llm.executor.max_seq_len = 1
    for _ in range(2):
        with pytest.raises(RequestError):
            list(chat.retry())
        assert chat.turns == [("a", "re: a"), ("b", "re: b")]
    llm.executor.max_seq_len = 1000
    list(chat.retry())
    assert chat.turns == [("a", "re: a"), ("b", "re: b")]


def test_a_question_that_failed_is_the_one_to_retry() -> None:
    llm = FakeLLM(max_seq_len=10)
    chat = talk(llm)
    list(chat.ask("a"))
    with pytest.raises(RequestError):
        list(chat.ask("a long question"))
    llm.executor.max_seq_len = 1000
    list(chat.retry())
    assert [question for question, _ in chat.turns][-1] == "a long question"
    assert llm.asked[-1][-1]["content"] == "a long question"


def test_values_can_be_changed_between_turns() -> None:
    chat = talk(FakeLLM())
    chat.set_values({"temperature": 0.5})
    assert chat._params == SamplingParams(max_new_tokens=10, temperature=0.5)
    with pytest.raises(RequestError):
        chat.set_values({"min_new_tokens": 50})
    chat.set_values({})
    assert chat._params == SamplingParams(max_new_tokens=10)
