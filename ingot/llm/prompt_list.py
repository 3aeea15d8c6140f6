"""What a caller may hand over as prompts.

Owns the forms: text, ids, a Prompt, a conversation, or a list of these. Knows no model.

    split_prompts("Hello") == ["Hello"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ingot.processors.prompt import Prompt

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Sequence[int] | Prompt


def split_prompts(
    value: PromptLike | Messages | Sequence[PromptLike | Messages],
) -> list[PromptLike | Messages]:
    """One prompt or a list of prompts → a list; a list of integers, or of messages, is one prompt."""
    if isinstance(value, (str, Prompt)) or not isinstance(value, Sequence):
        return [value]
    if is_conversation(value) or (value and all(isinstance(v, Integral) for v in value)):
        return [value]  # type: ignore[list-item]
    return list(value)  # type: ignore[arg-type]


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
