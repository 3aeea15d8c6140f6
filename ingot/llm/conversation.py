"""A chat that remembers.

Owns the history of one conversation: its system message, its turns, which of them still fit. Knows nothing of
terminals.

    talk = Conversation(llm, system="Be brief.")
    for piece in talk.ask("Hello"): print(piece.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from ingot.config.sampling import SamplingParams
from ingot.llm.llm import LLM
from ingot.llm.outputs import Piece

_ANSWER_SHARE = 4  # an answer is promised at most this part (1/4) of max_seq_len


class Conversation:
    """Turns of a user and an assistant.

    Attributes:
        system: the system message, None for the chat format's own; may be changed between turns.
        turns: (question, answer) pairs that the next question will see.
        num_dropped: turns that were forgotten because they no longer fit ``max_seq_len``.
    """

    def __init__(self, llm: LLM, system: str | None = None, params: SamplingParams | None = None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self.num_dropped = 0
        self._llm = llm
        self._params = params or llm.default_params

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = []

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """The conversation as chat messages, ending with ``question`` if one is given."""
        return self._messages(self.turns, question)

    def ask(self, question: str) -> Iterator[Piece]:
        """Stream the answer to a question.

        The turn joins the history when the answer ends or the iterator is closed, as far as it came. The
        oldest turns are dropped while the prompt leaves less than a quarter of ``max_seq_len`` (or
        ``max_new_tokens``, if that is less) for the answer. When nothing came, the history stays as it was.

        Raises:
            RequestError: at the first piece: the question alone is too long, or the messages do not fit the
                chat format.
        """
        kept = self._fitting(question)
        answer, ended = "", False
        try:
            with closing(self._llm.stream(self._messages(kept, question), self._params)) as pieces:
                for piece in pieces:
                    answer += piece.text
                    yield piece
            ended = True
        finally:
            if answer or ended:
                self.num_dropped += len(self.turns) - len(kept)
                self.turns = [*kept, (question, answer)]

    def _fitting(self, question: str) -> list[tuple[str, str]]:
        """The newest turns that fit beside the question and its answer."""
        longest = self._llm.executor.max_seq_len
        room = longest // _ANSWER_SHARE
        if self._params.max_new_tokens is not None:
            room = min(room, self._params.max_new_tokens)
        kept = self.turns
        while kept and len(self._llm.chat_ids(self._messages(kept, question))) > longest - room:
            kept = kept[1:]
        return kept

    def _messages(self, turns: list[tuple[str, str]], question: str | None) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = [
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *said, *asked]
