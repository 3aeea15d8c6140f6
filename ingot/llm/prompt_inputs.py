"""What a call may give as its prompt, and the token ids and inputs that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from ingot.config.grammar_spec import tool_schemas
from ingot.config.sampling_params import SamplingParams
from ingot.engine.engine_text import TextParts
from ingot.errors import RequestError
from ingot.llm.picture_prompts import Pictures
from ingot.runtime.encoding.prompt_rows import PLACEHOLDER, RowRules
from ingot.runtime.scheduling.inputs import InputRules, RequestInput, no_inputs
from ingot.text.prompt import Embeddings, Input, Piece, Prompt

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chat:
    """A conversation with what its chat template takes beside messages; accepted wherever a prompt is.

    Attributes:
        messages: ``[{"role": "user", "content": "..."}]``.
        tools: as in the OpenAI API; None or empty for none.
        template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``. A name
            that the template does not read is refused when the prompt is made.

    Raises:
        RequestError: a tool is malformed, or ``template_kwargs`` name what has a place of its own.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tools:
            tool_schemas(self.tools)
        taken = sorted({"messages", "tools", "add_generation_prompt"} & set(self.template_kwargs))
        if taken:
            what = "template_kwargs may not set what the request has a place for"
            raise RequestError(what, seen=taken, field="template_kwargs")

    @classmethod
    def of(cls, prompt: Chat | Messages) -> Chat:
        """A conversation; one of messages alone has no tools or variables."""
        return prompt if isinstance(prompt, cls) else cls(prompt)  # type: ignore[arg-type]

    @property
    def variables(self) -> dict[str, Any]:
        return {**({"tools": list(self.tools)} if self.tools else {}), **self.template_kwargs}


PromptLike = str | Sequence[int] | Prompt | Chat


class Entry(NamedTuple):
    """A prompt's token ids, whether it is a conversation, and its inputs."""

    ids: list[int]
    is_chat: bool = False
    inputs: tuple[RequestInput, ...] = ()

    @property
    def context(self) -> list[int]:
        """The ids whose text an answer continues: those behind the last placeholder."""
        first = max((one.end for one in self.inputs if one.tokens), default=0)
        return [] if self.is_chat else self.ids[first:]


def prompt_entry(
    prompt: PromptLike | Messages,
    text: TextParts,
    rules: InputRules | None = None,
    pictures: Pictures | None = None,
    rows: RowRules | None = None,
) -> Entry:
    """What a prompt becomes; ``rules`` and ``pictures`` of a model that takes these, ``rows`` of embeddings.

    Raises:
        RequestError: it is no prompt, needs a tokenizer or chat format that the engine lacks, or has an input
            that the model does not take.
    """
    pieces, is_chat = prompt_pieces(prompt, text, pictures)
    ids: list[int] = []
    inputs = []
    for piece in pieces:
        if isinstance(piece, Embeddings):
            if rows is None or is_chat:
                what = "only text and token ids are taken here"
                raise RequestError(what, seen="embeddings", fix="leave them out")
            inputs.append(rows.read(piece.rows, len(ids)))
            ids += [PLACEHOLDER] * inputs[-1].tokens
        elif not isinstance(piece, Input):
            ids += piece
        elif rules is None:
            raise no_inputs()
        else:
            inputs.append(rules.read(piece.features, len(ids), piece.name))
            ids += rules.placeholders(inputs[-1])
    return Entry(ids, is_chat, tuple(inputs))


def prompt_pieces(
    prompt: PromptLike | Messages, text: TextParts, pictures: Pictures | None = None
) -> tuple[Sequence[Piece], bool]:
    """Token ids, inputs and embeddings of a prompt in order, and whether it is a conversation. Raises as
    ``prompt_entry``, except for what the model takes.
    """
    if is_conversation(prompt):
        return chat_pieces(prompt, text, pictures), True  # type: ignore[arg-type]
    return Prompt.of(prompt).pieces(text.tokenizer), False


def chat_pieces(
    messages: Messages | Chat, text: TextParts, pictures: Pictures | None = None
) -> list[list[int] | Input]:
    """Token ids and inputs of a conversation in order; ``pictures`` reads parts that are no inputs yet.
    Raises RequestError where the engine has no tokenizer or chat format, or the messages do not fit it.
    """
    chat = Chat.of(messages)
    if text.tokenizer is None:
        raise RequestError(
            "the engine has no tokenizer, so it cannot chat",
            allowed='prompts of token ids: `ids="1 2 3"` of `ingot run`',
            fix="add the tokenizer's files to the checkpoint and build it again",
        )
    if text.chat is None:
        raise RequestError(
            "the engine has no chat template", fix="build with `chat_template=chatml`, vicuna or a file"
        )
    given = chat.messages if pictures is None else pictures.in_messages(chat.messages)
    return text.chat.prompt_pieces(given, text.tokenizer, variables=chat.variables)


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
    listed = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
    return listed or isinstance(prompt, Chat)
