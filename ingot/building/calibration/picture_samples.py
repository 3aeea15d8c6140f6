"""Pictures and texts to calibrate with, as the model reads them: pixels, and ids with placeholders."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.building.calibration.calibration_data import CalibrationData, check_limits, conversation, token_ids
from ingot.building.calibration.sample_records import (
    BadSample,
    Numbered,
    evenly,
    file_records,
    made_of,
    needed,
    raw_file,
    text_of,
)
from ingot.config.decoder_config import DecoderConfig
from ingot.config.picture_config import PictureFeatures
from ingot.engine.engine_text import TextParts
from ingot.image.image_reader import PictureReader
from ingot.image.picture_folder import CAPTIONS, SUFFIXES, picture_records
from ingot.text.chat.chat_pictures import ALIGNED, ALIGNMENT, alignment_prompt
from ingot.text.prompt import Embeddings, Input

SHAPES = (
    '{"image": "…", "text": "…"}, {"image": "…", "messages": […]}, {"image": "…", "token_ids": […]} or a '
    "record of text alone; or a folder of cc_sbu_align (filter_cap.json, image/) or of pictures"
)
_FIELD = "calib"
# Of records that say what is asked.
_OWN_WORDS = {"messages", "conversations", "prompt", "article", "token_ids"}


def read_pictures(
    path: Path, count: int, length: int, config: DecoderConfig, text: TextParts, seed: int | None = None
) -> CalibrationData:
    """At most ``count`` records, evenly spread over the data, each cut to ``length`` tokens.

    ``seed`` draws the question about each captioned picture from the original's four, in the frame of its
    training; None: the first of them, in the model's chat format. Raises ConfigError where the data cannot be
    read, a chosen record is no sample, or there is none; RequestError where a picture cannot be read.
    """
    check_limits(count, length)
    encoder = config.encoder
    assert encoder is not None
    digest = hashlib.sha256()
    records, folder = _records(path, count, digest)
    draws = None if seed is None else random.Random(seed)
    digest.update(b"" if seed is None else f"questions drawn by {seed}".encode())
    make = partial(_shown, folder, config, text, length, draws)
    chosen = made_of(path, evenly(records, count), make, SHAPES)
    features: list[torch.Tensor | None] = []
    wanted = PictureFeatures(encoder.features[-1])
    with PictureReader() as reader:
        for _, picture in chosen:
            if picture is None:
                features.append(None)
                continue
            digest.update(picture.read_bytes())
            features.append(reader.read(picture, wanted.side).pixels(wanted))
    samples = tuple(ids for ids, _ in chosen)
    return CalibrationData(path, samples, len(records), digest.hexdigest(), tuple(features))


def _records(path: Path, count: int, digest: Any) -> tuple[list[Numbered], Path]:
    """All records, and the folder that their pictures are relative to."""
    if not path.is_dir():
        if path.suffix.lower() in SUFFIXES and path.is_file():
            return [(1, {"image": path.name})], path.parent
        return file_records(path, SHAPES, count, digest), path.parent
    if (path / CAPTIONS).is_file():
        digest.update(raw_file(path / CAPTIONS))
    return list(picture_records(path, _FIELD)), path


def _shown(
    folder: Path,
    config: DecoderConfig,
    text: TextParts,
    length: int,
    draws: random.Random | None,
    record: Mapping[str, Any],
) -> tuple[tuple[int, ...], Path | None]:
    """The ids of a record, with placeholders, and its picture."""
    file = None if "image" not in record else folder / text_of(record["image"])
    if file is not None and not file.is_file():
        raise BadSample(f"there is no such picture: {file}")
    aligned = draws is not None and file is not None and not _OWN_WORDS & set(record)
    pieces = _aligned(record, text, draws) if aligned and draws else _pieces(record, file, text)
    return _cut(pieces, length, config), file


def _pieces(record: Mapping[str, Any], file: Path | None, text: TextParts) -> Sequence[Sequence[int] | Input]:
    """Token ids, and an input where the picture stands."""
    picture = None if file is None else Input(None)
    if "token_ids" in record:
        ids = token_ids(record)
        return [ids] if picture is None else [ids[:1], picture, ids[1:]]
    tokenizer = needed(text.tokenizer, "a text")
    if picture is None and "text" in record:
        return [tokenizer.encode(text_of(record["text"]))]
    messages = _messages(record)
    if text.chat is None or not text.chat.takes_inputs:
        words = tokenizer.encode("\n".join(one["content"] for one in messages), add_special_tokens=False)
        return [list(tokenizer.prefix_ids), *([] if picture is None else [picture]), words]
    if picture is not None:
        first = next((one for one in messages if one["role"] == "user"), None)
        if first is None:
            raise BadSample("no message of a user, in which the picture could stand")
        first["content"] = [{"type": "input", "input": picture}, {"type": "text", "text": first["content"]}]
    ends = messages[-1]["role"] == "user"
    return text.chat.prompt_pieces(messages, tokenizer, add_generation_prompt=ends)


def _aligned(
    record: Mapping[str, Any], text: TextParts, draws: random.Random
) -> Sequence[Sequence[int] | Input]:
    """A picture and its caption as the original's second stage of training has them."""
    tokenizer = needed(text.tokenizer, "a text")
    name = "" if text.chat is None else text.chat.name
    prompt = alignment_prompt(Input(None), draws.randrange(1 << 32), name)
    pieces = [piece for piece in prompt.pieces(tokenizer) if not isinstance(piece, Embeddings)]
    if "text" not in record:
        return pieces
    caption = f"{text_of(record['text'])}{ALIGNED[name][-1]}"
    return [*pieces, tokenizer.encode(caption, add_special_tokens=False, parse_special=False)]


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation about a picture; a caption answers what the original asks."""
    if "image" not in record or _OWN_WORDS & set(record):
        return [dict(message) for message in conversation(record)]
    found: list[dict[str, Any]] = [{"role": "user", "content": ALIGNMENT[0]}]
    if "text" in record:
        found.append({"role": "assistant", "content": text_of(record["text"])})
    return found


def _cut(pieces: Sequence[Sequence[int] | Input], length: int, config: DecoderConfig) -> tuple[int, ...]:
    encoder = config.encoder
    assert encoder is not None
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, Input):
            ids += [encoder.placeholder_id] * config.placeholders
            if len(ids) > length:
                raise BadSample(f"the picture does not fit in {length} tokens")
        elif encoder.placeholder_id in piece:
            raise BadSample(f"token {encoder.placeholder_id} stands for pictures")
        else:
            ids += piece
    if not ids:
        raise BadSample("it has no tokens")
    return tuple(ids[:length])
