"""Parts of messages that are not text; refused by name, so that nothing is fetched or decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.llm.picture_prompts import PARTS
from ingot.serve.api_errors import bad_request

_KINDS = {
    **dict.fromkeys(PARTS, "images"),
    "input_audio": "speech",
    "audio_url": "speech",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}


def refuse_media(messages: Sequence[Mapping[str, Any]], *, images: bool = False) -> None:
    """Raises ApiError for messages with media other than ``images``, where an engine takes these; other
    faults are for the chat format.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _KINDS and not (images and _KINDS[kind] == "images"):
                field = f"messages[{i}].content[{j}]"
                text = f"{field}: this engine does not take {_KINDS[kind]}"
                raise bad_request(text, field, "unsupported_parameter")


def picture_places(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Message and part of each picture."""
    return [
        (i, j)
        for i, message in enumerate(messages)
        for j, part in enumerate(message["content"] if isinstance(message.get("content"), list) else ())
        if isinstance(part, Mapping) and part.get("type") in PARTS
    ]


def without_parts(
    messages: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """A copy of the messages with nothing in these parts."""
    found = [dict(message) for message in messages]
    for i in {i for i, _ in places}:
        found[i]["content"] = list(found[i]["content"])
    for i, j in places:
        found[i]["content"][j] = {}
    return found
