"""What a call may give as its prompt, and the token ids and inputs that it becomes.

Owns the difference between text, ids and conversations, and the chat format's own stop strings. Knows no
executor.

    entry = prompt_entry([{"role": "user", "content": "Hi"}], engine.text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from ingot.config.sampling import SamplingParams
from ingot.engine.text import TextParts
from ingot.errors import RequestError
from ingot.processors.prompt import Input, Prompt
from ingot.runtime.inputs import InputRules, RequestInput, no_inputs

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Sequence[int] | Prompt


class Entry(NamedTuple):
    """A prompt's token ids, whether it is a conversation, and its inputs."""

    ids: list[int]
    is_chat: bool = False
    inputs: tuple[RequestInput, ...] = ()


def prompt_entry(prompt: PromptLike | Messages, text: TextParts, rules: InputRules | None = None) -> Entry:
    """What a prompt becomes; ``rules`` of a model that takes inputs.

    Raises:
        RequestError: it is no prompt, needs a tokenizer or chat format that the engine lacks, or has an input
            that the model does not take.
    """
    if is_conversation(prompt):
        return Entry(chat_ids(prompt, text), True)  # type: ignore[arg-type]
    ids: list[int] = []
    inputs = []
    for piece in Prompt.of(prompt).pieces(text.tokenizer):
        if not isinstance(piece, Input):
            ids += piece
        elif rules is None:
            raise no_inputs()
        else:
            inputs.append(rules.read(piece.features, len(ids)))
            ids += rules.placeholders(inputs[-1])
    return Entry(ids, False, tuple(inputs))


def chat_ids(messages: Messages, text: TextParts, variables: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids of the prompt that a conversation becomes; ``variables`` are the template's own.

    Raises:
        RequestError: the engine has no tokenizer or chat format, or the messages do not fit it.
    """
    if text.tokenizer is None:
        raise RequestError(
            "the engine has no tokenizer, so it cannot chat",
            allowed='prompts of token ids: `ingot run ENGINE --ids "1 2 3"`',
            fix="add the tokenizer's files to the checkpoint and build it again",
        )
    if text.chat is None:
        raise RequestError(
            "the engine has no chat template", fix="build with --chat-template chatml, vicuna or a file"
        )
    return text.chat.prompt_ids(messages, text.tokenizer, variables=variables)


def with_chat_stops(params: SamplingParams, text: TextParts) -> SamplingParams:
    """The values with the chat format's own stop strings (Vicuna's ``###``) added."""
    extra = text.chat.stop_strings if text.chat is not None else ()
    return params.replace(stop=(*params.stop, *extra)) if extra else params


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
