"""MiniGPT-4's prompts, in which pictures stand between texts.

Sources: ``CONV_VISION_Vicuna0``, ``CONV_VISION_LLama2`` and prompts/alignment.txt of the official
implementation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ingot.errors import RequestError
from ingot.text.chat.chat_format import ChatFormat, ConversationPart, Literal, encode_literals
from ingot.text.chat.chat_messages import Message
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
Text = list[Literal | str]


@dataclass(frozen=True)
class RoleFrame:
    """What precedes each role's messages, and what ends a message (the system's too)."""

    user: tuple[Literal | str, ...]
    assistant: str
    end: str


VICUNA = RoleFrame(("Human: ",), "Assistant: ", "###")
LLAMA2 = RoleFrame((Literal("<s>"), "[INST] "), " [/INST] ", "")
ALIGNED = {  # frames of the second stage's questions: before, after, and the end of the caption
    "minigpt4": ("###Human: ", " ###Assistant: ", "###"),
    "minigpt4-llama2": ("[INST] ", " [/INST] ", ""),
}


def alignment_prompt(picture: Input, seed: int | None = None, chat_format: str = "minigpt4") -> Prompt:
    """What the original's second stage of training asks about a picture, without a system message.

    Args:
        picture: from ``llm.read_image``.
        seed: draws one of the four questions; None: the first.
        chat_format: ``minigpt4``, or ``minigpt4-llama2`` for the Llama-2 variant.

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
    """MiniGPT-4's conversations. Each text between two pictures is encoded separately, as in the original,
    and the tokenizer's prefix comes once.
    """

    takes_inputs = True

    def __init__(self, name: str, frame: RoleFrame) -> None:
        self.name = name
        self._frame = frame
        self.stop_strings = (frame.end,) if frame.end else ()

    def _pieces(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[list[int] | Input]:
        found: list[list[int] | Input] = [list(tokenizer.prefix_ids)]
        for segment in self._segments(asked):
            found.append(segment if isinstance(segment, Input) else encode_literals(segment, tokenizer))
        return found

    def _ids(self, asked: ConversationPart, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces(asked, tokenizer):
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
        """Texts and pictures, alternating."""
        messages, frame, system = self._checked_turns(asked), self._frame, SYSTEM
        if messages[0]["role"] == "system":
            system, messages = _plain(messages[0]), messages[1:]
        found: list[Text | Input] = [[system + frame.end]]
        for message in messages:
            user = message["role"] == "user"
            content = message["content"] if user else _plain(message)
            written: list[str | Input] = []  # pictures between marks, with a space between parts
            for part in [content] if isinstance(content, str) else content:
                written += [" "] if written else []
                written += ["<Img>", part, "</Img>"] if isinstance(part, Input) else [part]
            for part in (*(frame.user if user else [frame.assistant]), *written, frame.end):
                _add(found, part)
        if asked.generate:
            _add(found, frame.assistant)
        return found


PICTURE_FORMATS = {
    name: PictureFormat(name, frame) for name, frame in (("minigpt4", VICUNA), ("minigpt4-llama2", LLAMA2))
}


def _plain(message: Message) -> str:
    """The text of a message that may not have a picture."""
    if not isinstance(message["content"], str):
        raise RequestError("only messages of the user have pictures", seen=message["role"], field="messages")
    return message["content"]


def _add(segments: list[Text | Input], part: Literal | str | Input) -> None:
    """Append a part; adjacent texts are encoded as one."""
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
