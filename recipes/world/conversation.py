"""What every generator of the world returns, and how it becomes ChatML.

Conversation("sums", "en", None, (Turn("1+1?", "1 + 1 = 2."),)).messages()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]
Split = Literal["train", "held-out"]
DEFAULT_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Turn:
    """One question of the user and the assistant's answer to it."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Conversation:
    """Turns with an optional system message (None: the frame starts with the user)."""

    task: str
    language: Language
    system: str | None
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages, roles ``system``, ``user`` and ``assistant``."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.assistant})
        return found
