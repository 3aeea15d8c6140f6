"""The interface of chat formats, and those made of fixed frames: ChatML (Qwen v1) and Vicuna."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import RequestError
from ingot.text.chat.chat_messages import Message, check_messages, check_turns, without_developer
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer_base import Tokenizer

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
QWEN_SYSTEM = "You are a helpful assistant."
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
VICUNA_V0_SYSTEM = VICUNA_SYSTEM.replace("user", "human")


@dataclass(frozen=True)
class Literal:
    """Text of the frame: a special token where the tokenizer has it."""

    text: str


Parts = Sequence[Literal | str]


@dataclass(frozen=True)
class ConversationPart:
    """What a prompt is made from; ``generate``: it ends with the start of the assistant's answer."""

    messages: Sequence[Mapping[str, Any]]
    generate: bool
    variables: Mapping[str, Any]


class ChatFormat(ABC):
    """Turns messages into a prompt.

    Attributes:
        name: its name in error messages.
        stop_strings: texts that end an answer.
        variables: names that a request may set in addition to messages, such as ``tools``.
        thinks: answers may begin with a ``<think>`` block.
        takes_inputs: messages may have pictures.
    """

    name: str
    stop_strings: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()
    thinks: bool = False
    takes_inputs: bool = False

    def prompt_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenizer: Tokenizer | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, for display: encoding it is not safe, see ``prompt_ids``.

        Args:
            tokenizer: needed only to drop old turns as ``prompt_ids`` does.
            add_generation_prompt: end with the start of the assistant's answer.
            variables: further values for a template, such as ``enable_thinking`` or ``tools``.

        Raises:
            RequestError: the messages or variables do not fit this format.
        """
        return self._text(ConversationPart(messages, add_generation_prompt, variables or {}), tokenizer)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt; special tokens written inside a message stay text. Raises
        ``RequestError`` if the messages or variables do not fit this format.
        """
        return self._ids(ConversationPart(messages, add_generation_prompt, variables or {}), tokenizer)

    def prompt_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[list[int] | Input]:
        """``prompt_ids`` cut at the messages' inputs, which stand between; raises the same errors."""
        return self._pieces(ConversationPart(messages, add_generation_prompt, variables or {}), tokenizer)

    @abstractmethod
    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str: ...

    @abstractmethod
    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]: ...

    def _pieces(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[list[int] | Input]:
        return [self._ids(asked, tokenizer)]

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens that end an answer in this format."""
        return () if tokenizer.eos_id is None else (tokenizer.eos_id,)

    def _checked_turns(self, asked: ConversationPart) -> list[Message]:
        """The messages of a format without a template."""
        if asked.variables:
            raise RequestError(f"{self.name} has no template variables", seen=sorted(asked.variables))
        messages = without_developer(check_messages(asked.messages, inputs=self.takes_inputs))
        check_turns(messages, add_generation_prompt=asked.generate)
        return messages


class FramedFormat(ChatFormat):
    """A format whose prompt is a list of parts."""

    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        parts = self._checked_parts(asked, tokenizer)
        return "".join(part.text if isinstance(part, Literal) else part for part in parts)

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        return [*tokenizer.prefix_ids, *encode_literals(self._checked_parts(asked, tokenizer), tokenizer)]

    def _checked_parts(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> Parts:
        return self._parts(self._checked_turns(asked), tokenizer, asked.generate)

    @abstractmethod
    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        """The prompt of checked messages."""


class ChatML(FramedFormat):
    """Qwen v1's prompt (make_context of its reference).

    Args:
        max_window: the oldest turns are dropped while the system message and the turns before the last
            question need ``max_window`` tokens or more. The last question is neither counted nor cut. None
            keeps everything.
    """

    name = "chatml"

    def __init__(self, max_window: int | None = None) -> None:
        self._max_window = max_window

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        specials = tokenizer.special_tokens
        return tuple(specials[text] for text in (IM_END, IM_START, END_OF_TEXT) if text in specials)

    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        instruction, messages = _split_system(messages, QWEN_SYSTEM)
        system = _framed("system", instruction)
        turns: list[list[Literal | str]] = []  # a user's message and its answers, each after a line break
        for message in messages:
            if message["role"] == "user":
                turns.append([])
            turns[-1] += ["\n", *_framed(message["role"], message["content"])]
        kept = self._newest(system, turns[:-1], tokenizer)
        answer: Parts = ["\n", Literal(IM_START), "assistant", "\n"] if generate else []
        return [*system, *(part for turn in [*kept, *turns[-1:]] for part in turn), *answer]

    def _newest(
        self, system: list[Literal | str], history: list[list[Literal | str]], tokenizer: Tokenizer | None
    ) -> list[list[Literal | str]]:
        """The newest turns that fit with the system message."""
        if tokenizer is None or self._max_window is None:
            return history
        used = len(encode_literals(system, tokenizer))
        for kept, turn in enumerate(reversed(history)):
            used += len(encode_literals(turn, tokenizer))
            if used >= self._max_window:
                return history[len(history) - kept :]
        return history


class Vicuna(FramedFormat):
    """Vicuna v1.1: ``USER: … ASSISTANT: …</s>`` (FastChat's ``vicuna_v1.1``)."""

    name = "vicuna"

    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        system, turns = _split_system(messages, VICUNA_SYSTEM)
        eos = (
            None if tokenizer is None or tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id)
        )
        end = Literal(eos or "</s>")
        parts: list[Literal | str] = [f"{system} " if system else ""]
        for message in turns:
            if message["role"] == "user":
                parts[-1:] = _joined(parts[-1], f"USER: {message['content']} ")
            else:
                parts[-1:] = [*_joined(parts[-1], f"ASSISTANT: {message['content']}"), end]
        return [*parts[:-1], *_joined(parts[-1], "ASSISTANT:")] if generate else parts


class VicunaV0(FramedFormat):
    """Vicuna v0: turns separated by ``###`` (FastChat's v0, MiniGPT-4's language model)."""

    name = "vicuna-v0"
    stop_strings = ("###",)

    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        system, turns = _split_system(messages, VICUNA_V0_SYSTEM)
        names = {"user": "Human", "assistant": "Assistant"}
        text = "".join(f"{names[message['role']]}: {message['content']}###" for message in turns)
        return [f"{system}###{text}{'Assistant:' if generate else ''}"]


def encode_literals(parts: Parts, tokenizer: Tokenizer) -> list[int]:
    """Ids of parts, the frame's special tokens included."""
    specials = tokenizer.special_tokens
    return tokenizer.encode_parts(
        [specials.get(part.text, part.text) if isinstance(part, Literal) else part for part in parts]
    )


def _framed(role: str, content: str) -> list[Literal | str]:
    """One ChatML message; role, line break and content are encoded separately, as in the reference."""
    return [Literal(IM_START), role, "\n", content, Literal(IM_END)]


def _split_system(messages: list[Message], default: str) -> tuple[str, list[Message]]:
    if messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return default, messages


def _joined(last: Literal | str, text: str) -> list[Literal | str]:
    """``last`` and ``text`` joined, to be encoded as one, unless ``last`` is a literal."""
    return [last, text] if isinstance(last, Literal) else [last + text]
