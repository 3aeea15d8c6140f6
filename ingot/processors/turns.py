"""What was said in a conversation.

Owns the turns, the system message, and when a turn joins them. Knows not who answers.

    class Echo(Turns):
        def _begin(self, question): return self.turns, iter([Said(question)])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing
from typing import Generic, Protocol, TypeVar


class Spoken(Protocol):
    """A part of an answer."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...


Part = TypeVar("Part", bound=Spoken)


class Turns(ABC, Generic[Part]):
    """Turns of a user and an assistant.

    Attributes:
        system: the system message, None for the chat format's own; may be changed between turns.
        turns: (question, answer) pairs that the next question will see.
        num_dropped: turns that were forgotten because they no longer fit.
    """

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self.num_dropped = 0

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = []

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """The conversation as chat messages, ending with ``question`` if one is given."""
        return self._messages(self.turns, question)

    def ask(self, question: str) -> Generator[Part, None, None]:
        """Stream the answer to a question.

        The turn joins the history when the answer ends or the iterator is closed, as far as it came. The
        oldest turns are dropped where they no longer fit. When nothing came, the history stays as it was.

        Raises:
            IngotError: at the first part or later: the question cannot be answered.
        """
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
                self.turns = [*kept, (question, answer)]

    @abstractmethod
    def _begin(self, question: str) -> tuple[list[tuple[str, str]], Generator[Part, None, None]]:
        """The newest turns that fit beside the question, and its answer."""

    def _messages(self, turns: list[tuple[str, str]], question: str | None) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = [
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *said, *asked]
