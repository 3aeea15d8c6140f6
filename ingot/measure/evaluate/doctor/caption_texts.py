"""Pictures with their captions as a probe reads them.

Owns the prompt of a picture, the tokens that count, and which items serve. Independent of passes.

    texts = captioned_texts(data, text_parts, config, most=2048)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot.config.decoder_config import DecoderConfig
from ingot.config.picture_config import PictureFeatures
from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError
from ingot.image.image_reader import PictureReader
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.doctor.precision_probe import Text
from ingot.measure.evaluate.eval_prompts import need_chat, need_tokenizer
from ingot.measure.evaluate.scored_captions import QUESTION, picture_check
from ingot.text.prompt import Input


def captioned(folder: Path) -> Callable[[DataItem], str | None]:
    """Why an item does not serve: it needs a picture, named from ``folder`` on, and a caption."""
    shown = picture_check(folder)

    def why(item: DataItem) -> str | None:
        found = shown(item)
        return "a picture without a caption" if found is None and not item.references else found

    return why


def captioned_texts(
    data: DataFile, text: TextParts, config: DecoderConfig, most: int | None, room: int
) -> list[Text]:
    """The question about each picture with placeholders, then at most ``most`` tokens of its first caption
    (None: all); what counts is expected from the last token of the prompt on.

    Raises:
        ConfigError: there is no tokenizer or chat format, or an item is longer than ``room`` tokens.
        RequestError: a picture cannot be read.
    """
    encoder, tokenizer, chat = config.encoder, need_tokenizer(text), need_chat(text.chat)
    assert encoder is not None
    wanted = PictureFeatures(encoder.features[-1])
    content = [{"type": "input", "input": Input(None)}, {"type": "text", "text": QUESTION}]
    prompt: list[int] = []
    for piece in chat.prompt_pieces([{"role": "user", "content": content}], tokenizer):
        prompt += [encoder.placeholder_id] * config.placeholders if isinstance(piece, Input) else piece
    found = []
    with PictureReader() as reader:
        for item in data.items:
            caption = tokenizer.encode(item.references[0], add_special_tokens=False, parse_special=False)
            ids = (*prompt, *caption[:most])
            if len(ids) > room:
                raise ConfigError(
                    f"the caption of item {item.number} is longer than the model's context",
                    seen=f"{len(ids)} tokens with its picture",
                    allowed=room,
                    field="max_tokens",
                )
            pixels = reader.read(data.folder / (item.image or ""), wanted.side).pixels(wanted)
            found.append(Text(ids, range(len(prompt) - 1, len(ids)), pixels))
    return found
