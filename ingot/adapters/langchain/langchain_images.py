"""Pictures in LangChain's messages.

Covers the content blocks that are pictures, and what they may be given as. Independent of engines: who reads
a picture is an argument.

    as_input({"type": "image", "base64": "…", "mime_type": "image/png"}, 1, llm.read_image)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.text.prompt import Input

Read = Callable[[str], Input]  # of a data URL
_ALLOWED = 'a data URL: {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, or base64'


def is_image(block: Any) -> bool:
    """Whether a content block is a picture, in LangChain's or OpenAI's shape."""
    return isinstance(block, Mapping) and block.get("type") in ("image_url", "image", "input_image")


def as_input(block: Mapping[str, Any], position: int, read: Read) -> dict[str, Any]:
    """The part of a message that a picture becomes.

    Args:
        position: of its message, for errors.

    Raises:
        RequestError: it is no data URL, or cannot be read.
    """
    try:
        return {"type": "input", "input": read(_data_url(block))}
    except RequestError as error:
        what = f"message {position}: {error.what}"
        raise RequestError(what, seen=error.seen, allowed=error.allowed, fix=error.fix) from None


def _data_url(block: Mapping[str, Any]) -> str:
    given = block.get("base64", block.get("data"))
    if isinstance(given, str):
        return f"data:;base64,{given}"  # the content says what it is
    url = block.get("url", block.get("image_url"))
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        seen = url[:80] if isinstance(url, str) else sorted(map(str, block))
        what = "a picture must be a data URL or base64: nothing is fetched, and no file is read"
        raise RequestError(what, seen=seen, allowed=_ALLOWED)
    return url
