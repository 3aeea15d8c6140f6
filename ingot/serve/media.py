"""Parts of messages that are no text.

Owns the refusal of pictures and sounds by an engine that reads text: by the part's name alone, so that
nothing is fetched or decoded. Knows no chat format.

    refuse_media([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:…"}}]}])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.serve.errors import bad_request

_KINDS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "speech",
    "audio_url": "speech",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}


def refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages with parts of these kinds; what else is wrong with a message, the chat format says.

    Raises:
        ApiError: there is such a part.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _KINDS:
                field = f"messages[{i}].content[{j}]"
                text = f"{field}: this engine does not take {_KINDS[kind]}"
                raise bad_request(text, field, "unsupported_parameter")
