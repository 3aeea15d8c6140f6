"""What every chat format offers.

Covers the interface and the formats made of fixed frames: ChatML (Qwen v1) and Vicuna. The frame alone makes
special tokens: what a user types stays text.

    ChatML(max_window=6144).prompt_ids([{"role": "user", "content": "Hi"}], tokenizer)
"""

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
    """Part of a prompt that the frame writes: a special token where the tokenizer has it, else its text."""

    text: str


Parts = Sequence[Literal | str]


@dataclass(frozen=True)
class ConversationPart:
    """What a prompt is made of; ``generate``: it ends with the start of the assistant's answer."""

    messages: Sequence[Mapping[str, Any]]
    generate: bool
    variables: Mapping[str, Any]


class ChatFormat(ABC):
    """Messages to a prompt.

    Attributes:
        name: how messages for people call it.
        stop_strings: texts that end an answer.
        variables: names that a request may set beside messages; a format with ``tools`` tells the model of
            them.
        thinks: answers may begin with a block of thoughts (``<think>``).
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
        """The prompt as people read it. Encoding it again is not safe: see ``prompt_ids``.

        Args:
            tokenizer: needed only to cut old turns as ``prompt_ids`` does.
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
        """Token ids of the prompt; special tokens written inside a message stay text.

        Raises:
            RequestError: the messages or variables do not fit this format.
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
        """The same with the messages' inputs where they stand, of a format that takes them.

        Raises:
            RequestError: as ``prompt_ids``.
        """
        asked = ConversationPart(messages, add_generation_prompt, variables or {})
        return [self._ids(asked, tokenizer)]

    @abstractmethod
    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        """As ``prompt_text``."""

    @abstractmethod
    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        """As ``prompt_ids``."""

    @abstractmethod
    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens that end an answer in this format."""


class FramedFormat(ChatFormat):
    """A format whose prompt is a list of parts."""

    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        parts = self._checked_parts(asked, tokenizer)
        return "".join(part.text if isinstance(part, Literal) else part for part in parts)

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        return [*tokenizer.prefix_ids, *encode_literals(self._checked_parts(asked, tokenizer), tokenizer)]

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return () if tokenizer.eos_id is None else (tokenizer.eos_id,)

    def _checked_parts(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> Parts:
        if asked.variables:
            raise RequestError(f"{self.name} has no template variables", seen=sorted(asked.variables))
        checked = without_developer(check_messages(asked.messages))
        check_turns(checked, add_generation_prompt=asked.generate)
        return self._parts(checked, tokenizer, asked.generate)

    @abstractmethod
    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        """The prompt of checked messages."""


class ChatML(FramedFormat):
    """Qwen v1's prompt (make_context of its reference).

    Args:
        max_window: old turns are dropped, the oldest first, while the system message and the turns before the
            last question need ``max_window`` tokens or more. The last question is neither counted nor cut.
            None keeps everything.
    """

    name = "chatml"

    def __init__(self, max_window: int | None = None) -> None:
        self._max_window = max_window

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        specials = tokenizer.special_tokens
        return tuple(specials[text] for text in (IM_END, IM_START, END_OF_TEXT) if text in specials)

    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        has_system = messages[0]["role"] == "system"
        system = _framed("system", messages[0]["content"] if has_system else QWEN_SYSTEM)
        turns = _turns(messages[1:] if has_system else messages)
        kept = self._newest(system, turns[:-1], tokenizer)
        answer: Parts = ["\n", Literal(IM_START), "assistant", "\n"] if generate else []
        return [*system, *(part for turn in [*kept, *turns[-1:]] for part in turn), *answer]

    def _newest(
        self, system: list[Literal | str], history: list[list[Literal | str]], tokenizer: Tokenizer | None
    ) -> list[list[Literal | str]]:
        """The newest turns that fit beside the system message."""
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
        end = _eos_literal(tokenizer)
        parts: list[Literal | str] = [f"{system} " if system else ""]
        for message in turns:
            if message["role"] == "user":
                parts[-1:] = _joined(parts[-1], f"USER: {message['content']} ")
            else:
                parts[-1:] = [*_joined(parts[-1], f"ASSISTANT: {message['content']}"), end]
        return [*parts[:-1], *_joined(parts[-1], "ASSISTANT:")] if generate else parts


class VicunaV0(FramedFormat):
    """Vicuna v0: ``### Human``-style turns parted by ``###`` (FastChat's v0, MiniGPT-4's language model)."""

    name = "vicuna-v0"
    stop_strings = ("###",)

    def _parts(self, messages: list[Message], tokenizer: Tokenizer | None, generate: bool) -> Parts:
        system, turns = _split_system(messages, VICUNA_V0_SYSTEM)
        names = {"user": "Human", "assistant": "Assistant"}
        text = "".join(f"{names[message['role']]}: {message['content']}###" for message in turns)
        return [f"{system}###{text}{'Assistant:' if generate else ''}"]


def encode_literals(parts: Parts, tokenizer: Tokenizer) -> list[int]:
    """Ids of parts, the frame's special tokens among them."""
    specials = tokenizer.special_tokens
    return tokenizer.encode_parts(
        [specials.get(part.text, part.text) if isinstance(part, Literal) else part for part in parts]
    )


def _framed(role: str, content: str) -> list[Literal | str]:
    """One ChatML message; role, line break and content are encoded apart, as in the reference."""
    return [Literal(IM_START), role, "\n", content, Literal(IM_END)]


def _turns(messages: list[Message]) -> list[list[Literal | str]]:
    """ChatML parts of each turn: a user's message and the answers to it, each after a line break."""
    turns: list[list[Literal | str]] = []
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        turns[-1] += ["\n", *_framed(message["role"], message["content"])]
    return turns


def _split_system(messages: list[Message], default: str) -> tuple[str, list[Message]]:
    if messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return default, messages


def _eos_literal(tokenizer: Tokenizer | None) -> Literal:
    eos = None if tokenizer is None or tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id)
    return Literal(eos or "</s>")


def _joined(last: Literal | str, text: str) -> list[Literal | str]:
    """``last`` and ``text`` as one text, which is encoded as one, unless ``last`` is the frame's."""
    return [last, text] if isinstance(last, Literal) else [last + text]
