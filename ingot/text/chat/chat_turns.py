"""The history of a conversation: its system message and turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, Generic, Protocol, TypeVar

from ingot.errors import RequestError


class Spoken(Protocol):
    """A piece of an answer."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...


Part = TypeVar("Part", bound=Spoken)
Question = str | list[dict[str, Any]]  # a text, or pictures and a text: the parts of a message
Turn = tuple[Question, str]


class Turns(ABC, Generic[Part]):
    """Turns of a user and an assistant.

    Attributes:
        system: the system message, None for the chat format's own; may be changed between turns.
        turns: (question, answer) pairs that precede the next question.
        pictures: message parts that go with the next question.
        num_dropped: turns dropped because they no longer fit.
    """

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[Turn] = []
        self.pictures: list[dict[str, Any]] = []
        self.num_dropped = 0
        self._unanswered: Question | None = None

    def clear(self) -> None:
        """Forget all turns and pictures; the system message stays."""
        self.turns, self.pictures, self._unanswered = [], [], None

    def show(self, path: str) -> None:
        """Send a picture's file with the next question; it is kept until a question is answered. Raises
        ``RequestError`` if it cannot be read, or the model takes no pictures.
        """
        self.pictures.append(self._picture(path))

    def messages(
        self, question: Question | None = None, turns: list[Turn] | None = None
    ) -> list[dict[str, Any]]:
        """The conversation as chat messages, ending with ``question`` if there is one; with ``turns`` in
        place of its own.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        answered = [
            {"role": role, "content": content}
            for turn in (self.turns if turns is None else turns)
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *answered, *asked]

    def ask(self, question: str) -> Generator[Part, None, None]:
        """Stream the answer to a question.

        The turn joins the history when the answer ends or the iterator is closed, with the answer so far. The
        oldest turns are dropped where they no longer fit. Without any answer the history stays unchanged.

        Raises:
            IngotError: while iterating: the question cannot be answered.
        """
        pictures = self.pictures
        yield from self._ask([*pictures, {"type": "text", "text": question}] if pictures else question)

    def _ask(self, question: Question) -> Generator[Part, None, None]:
        self._unanswered = question
        kept, pieces = self._begin(question)
        answer, ended = "", False
        try:
            with closing(pieces):
                for piece in pieces:
                    answer += piece.text
                    yield piece
            ended = True
        finally:
            if answer or ended:
                self.num_dropped += len(self.turns) - len(kept)
                self.turns, self._unanswered = [*kept, (question, answer)], None
                self.pictures = []

    def retry(self) -> Generator[Part, None, None]:
        """``ask`` the last question again; its new answer, if any comes, replaces the old one. Raises
        ``RequestError`` if no question was asked.
        """
        turns, unanswered = self.turns, self._unanswered
        question = unanswered
        if question is None:
            if not turns:
                raise RequestError("there is no message to answer again")
            question, self.turns = turns[-1][0], turns[:-1]
        try:
            yield from self._ask(question)
        finally:
            if self._unanswered is not None:
                self.turns, self._unanswered = turns, unanswered

    @abstractmethod
    def set_values(self, values: Mapping[str, Any]) -> None:
        """Set the sampling values of later answers, over the defaults. Raises ``RequestError`` if they cannot
        be combined.
        """

    @abstractmethod
    def _begin(self, question: Question) -> tuple[list[Turn], Generator[Part, None, None]]:
        """The newest turns that fit with the question, and its answer."""

    @abstractmethod
    def _picture(self, path: str) -> dict[str, Any]:
        """The message part of a picture's file; raises as ``show``."""
