"""A chat with an engine that remembers the turns that still fit."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.llm.llm import LLM
from ingot.llm.outputs import Piece
from ingot.text.chat.chat_turns import Question, Turn, Turns

_ANSWER_SHARE = 4  # an answer is promised at most this part (1/4) of max_seq_len


class Conversation(Turns[Piece]):
    """Turns of a user and an engine.

    The oldest turns are dropped while the prompt leaves less than a quarter of ``max_seq_len`` (or
    ``max_new_tokens``, if that is less) for the answer. Asking raises RequestError where the question alone
    is too long, or the messages do not fit the chat format.
    """

    def __init__(self, llm: LLM, system: str | None = None, params: SamplingParams | None = None) -> None:
        super().__init__(system)
        self._llm = llm
        self._params = params or llm.default_params

    def set_values(self, values: Mapping[str, Any]) -> None:
        self._params = self._llm.default_params.replace(**values)

    def _picture(self, path: str) -> dict[str, Any]:
        return {"type": "input", "input": self._llm.read_image(path), "path": path}  # decoded once

    def _begin(self, question: Question) -> tuple[list[Turn], Generator[Piece, None, None]]:
        longest = self._llm.executor.max_seq_len
        room = longest // _ANSWER_SHARE
        if self._params.max_new_tokens is not None:
            room = min(room, self._params.max_new_tokens)
        kept = self.turns
        while kept and len(self._llm.chat_ids(self.messages(question, kept))) > longest - room:
            kept = kept[1:]
        return kept, self._llm.stream(self.messages(question, kept), self._params)
