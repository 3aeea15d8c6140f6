"""The prompts of MiniGPT-4, in which pictures stand between texts.

Covers both official frames, and the questions of the second stage of training.

    content = [{"type": "input", "input": picture}, {"type": "text", "text": "What is this?"}]
    pieces = picture_formats()["minigpt4"].prompt_pieces([{"role": "user", "content": content}], tokenizer)
Sources: ``CONV_VISION_Vicuna0``, ``CONV_VISION_LLama2`` and prompts/alignment.txt of the official
implementation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import RequestError
from ingot.text.chat.chat_format import ChatFormat, ConversationPart, Literal, encode_literals
from ingot.text.chat.chat_messages import Message, check_messages, check_turns, without_developer
from ingot.text.prompt import Input, Prompt
from ingot.text.tokenizer.tokenizer_base import Tokenizer

SYSTEM = (
    "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I provide it "
    "to you. Please answer my questions."
)
ALIGNMENT = (  # what the second stage of training asks about each picture
    "Describe this image in detail.",
    "Take a look at this image and describe what you notice.",
    "Please provide a detailed description of the picture.",
    "Could you describe the contents of this image for me?",
)
MARK = "<ImageHere>"  # a picture, in a prompt as text


@dataclass(frozen=True)
class RoleFrame:
    """What stands before each role's messages, and behind a message and the system's."""

    user: tuple[Literal | str, ...]
    assistant: str
    end: str


Text = list[Literal | str]
VICUNA = RoleFrame(("Human: ",), "Assistant: ", "###")
LLAMA2 = RoleFrame((Literal("<s>"), "[INST] "), " [/INST] ", "")


ALIGNED = {
    "minigpt4": ("###Human: ", " ###Assistant: ", "###"),
    "minigpt4-llama2": ("[INST] ", " [/INST] ", ""),
}


def alignment_prompt(picture: Input, seed: int | None = None, chat_format: str = "minigpt4") -> Prompt:
    """What the original's second stage of training asks about a picture, without a system's message.

    Args:
        picture: as ``llm.read_image`` gives it.
        seed: draws one of the four questions; None: the first.
        chat_format: ``minigpt4``, or ``minigpt4-llama2`` of the Llama-2 variant.

    Raises:
        RequestError: no such format.
    """
    if chat_format not in ALIGNED:
        raise RequestError(
            "no such chat format", seen=chat_format, allowed=list(ALIGNED), field="chat_format"
        )
    question = ALIGNMENT[0] if seed is None else random.Random(seed).choice(ALIGNMENT)
    before, behind, _ = ALIGNED[chat_format]
    return Prompt([f"{before}<Img>", picture, f"</Img> {question}{behind}"])


class PictureFormat(ChatFormat):
    """MiniGPT-4's conversations. Each text between two pictures is encoded apart, as the original does; the
    tokenizer's start stands once.
    """

    takes_inputs = True

    def __init__(self, name: str, frame: RoleFrame) -> None:
        self.name = name
        self._frame = frame
        self.stop_strings = (frame.end,) if frame.end else ()

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return () if tokenizer.eos_id is None else (tokenizer.eos_id,)

    def prompt_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[list[int] | Input]:
        found: list[list[int] | Input] = []
        for segment in self._segments(ConversationPart(messages, add_generation_prompt, variables or {})):
            found.append(segment if isinstance(segment, Input) else encode_literals(segment, tokenizer))
        return [list(tokenizer.prefix_ids), *found]

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        pieces = self.prompt_pieces(
            asked.messages, tokenizer, add_generation_prompt=asked.generate, variables=asked.variables
        )
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, Input):
                raise RequestError("only text is taken here", seen="a picture", fix="leave it out")
            ids += piece
        return ids

    def _text(self, asked: ConversationPart, tokenizer: Tokenizer | None) -> str:
        texts = [
            part for one in self._segments(asked) for part in ([MARK] if isinstance(one, Input) else one)
        ]
        return "".join(part.text if isinstance(part, Literal) else part for part in texts)

    def _segments(self, asked: ConversationPart) -> list[Text | Input]:
        """Texts and pictures in turn."""
        if asked.variables:
            raise RequestError(f"{self.name} has no template variables", seen=sorted(asked.variables))
        messages = without_developer(check_messages(asked.messages, inputs=True))
        check_turns(messages, add_generation_prompt=asked.generate)
        frame, system = self._frame, SYSTEM
        if messages[0]["role"] == "system":
            system, messages = _plain(messages[0]), messages[1:]
        found: list[Text | Input] = [[system + frame.end]]
        for message in messages:
            user = message["role"] == "user"
            written = _marked(message["content"]) if user else [_plain(message)]
            for part in (*(frame.user if user else [frame.assistant]), *written, frame.end):
                _add(found, part)
        if asked.generate:
            _add(found, frame.assistant)
        return found


def picture_formats() -> dict[str, PictureFormat]:
    """By name."""
    frames = {"minigpt4": VICUNA, "minigpt4-llama2": LLAMA2}
    return {name: PictureFormat(name, frame) for name, frame in frames.items()}


def _marked(content: str | Sequence[str | Input]) -> list[str | Input]:
    """A user's message with its pictures between marks; a space parts what is beside them."""
    found: list[str | Input] = []
    for part in [content] if isinstance(content, str) else content:
        found += [" "] if found else []
        found += ["<Img>", part, "</Img>"] if isinstance(part, Input) else [part]
    return found


def _plain(message: Message) -> str:
    """The text of a message that may have no picture."""
    if not isinstance(message["content"], str):
        raise RequestError("only messages of the user have pictures", seen=message["role"], field="messages")
    return message["content"]


def _add(segments: list[Text | Input], part: Literal | str | Input) -> None:
    """Texts that are neighbours are encoded as one."""
    if isinstance(part, Input):
        segments.append(part)
        return
    last = segments[-1]
    if isinstance(last, Input):
        segments.append([part])
    elif isinstance(part, str) and isinstance(last[-1], str):
        last[-1] += part
    else:
        last.append(part)
