"""What an explanation of a request says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ingot.config.json_config import JsonConfig

Origin = Literal["request", "generation_config", "default"]


@dataclass(frozen=True)
class TokenPiece(JsonConfig):
    """One token of the prompt.

    Attributes:
        text: its text, bytes that are no UTF-8 by themselves as ``\\xe4``; None without a tokenizer, or for
            an id that the tokenizer does not have.
        bytes: its bytes in hexadecimal where they are no UTF-8 by themselves, else None.
        special: a special token, made by the tokenizer or the chat format and not by letters.
    """

    id: int
    text: str | None
    bytes: str | None
    special: bool


@dataclass(frozen=True)
class StopRule(JsonConfig):
    """A token id, or a text, that ends an answer.

    Attributes:
        text: the id's text, or the stop string itself.
        id: None for a stop string.
        origins: where it is from: ``generation_config``, ``config.json``, ``tokenizer``, ``chat format``,
            ``request``.
        active: False for an end token of the model under ``ignore_eos``.
    """

    text: str | None
    id: int | None
    origins: tuple[str, ...]
    active: bool


@dataclass(frozen=True)
class SamplingValue(JsonConfig):
    """One field of the sampling parameters, where it is from, and what else is to be known of it."""

    name: str
    value: Any
    origin: Origin
    note: str | None = None


@dataclass(frozen=True)
class Explanation(JsonConfig):
    """A request, before it runs.

    Attributes:
        kind: what the prompt was given as.
        chat_format: name of the chat format, for a conversation.
        prompt_text: what the model reads: the text of all token ids, special tokens included; None without a
            tokenizer.
        rendered_text: what the chat format wrote, before it became ids; None where there was none.
        num_prompt_tokens, max_seq_len, room: tokens of the prompt, of the engine, and left for new ones.
        max_new_tokens: most tokens that an answer can have: the request's limit or ``room``.
        processors: rules that change the logits, in their order.
        choice: how a token is chosen then.
        seed: what makes the choice repeatable.
        differences: what Hugging Face's ``generate`` would do differently, a sentence each.
        notes: reasons for which the request would be refused, and other surprises.
    """

    kind: Literal["text", "conversation", "token ids", "parts"]
    chat_format: str | None
    prompt_text: str | None
    rendered_text: str | None
    tokens: tuple[TokenPiece, ...]
    num_prompt_tokens: int
    max_seq_len: int
    room: int
    max_new_tokens: int
    stops: tuple[StopRule, ...]
    sampling: tuple[SamplingValue, ...]
    processors: tuple[str, ...]
    choice: str
    seed: str
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def value(self, name: str) -> SamplingValue:
        return next(v for v in self.sampling if v.name == name)
