"""Pictures of a request to Triton, which stand at the marks in ``text_input``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ingot.serve.api_errors import ApiError, bad_request
from ingot.serve.served_model import ServedModel
from ingot.text.chat.chat_pictures import MARK

FIELD = "image"


def as_messages(images: Sequence[str]) -> list[dict[str, Any]]:
    """Base64 texts, or data URLs, as a conversation's pictures."""
    urls = [one if one[:5].lower() == "data:" else f"data:;base64,{one}" for one in images]
    return [{"content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}] if urls else []


def slots_of(model: ServedModel, images: Sequence[str]) -> AbstractContextManager[Sequence[int]]:
    """As ``ServedModel.picture_slots``; raises ApiError also where the model takes none."""
    if images and model.pictures is None:
        raise bad_request(f"{FIELD}: {model.name} does not take images", FIELD, "unsupported_parameter")
    try:
        return model.picture_slots(as_messages(images))
    except ApiError as error:
        raise _named(error) from None


def prompt_of(model: ServedModel, text: str, count: int) -> tuple[list[int], list[int]]:
    """Ids of a prompt with ``count`` pictures, and where each begins; without pictures a mark is text. Texts
    between them are encoded apart, with the tokenizer's start token once. Raises ApiError where it cannot be
    encoded, or has another number of marks.
    """
    if not count or model.pictures is None:
        return model.prompt_ids(text), []
    first, *rest = text.split(MARK)
    if len(rest) != count:
        what = f"text_input has {MARK} {len(rest)} times, and there are {count} images"
        raise bad_request(what, "text_input")
    ids, places = list(model.prompt_ids(first)), []
    for one in rest:
        places.append(len(ids))
        ids += model.prompt_ids(one, add_special_tokens=False) if one else []
    return model.pictures.with_placeholders(ids, places)


def read_images(
    model: ServedModel, images: Sequence[str], slots: Sequence[int], cancelled: threading.Event
) -> None:
    """As ``ServedModel.read_pictures``."""
    try:
        model.read_pictures(as_messages(images), slots, cancelled)
    except ApiError as error:
        raise _named(error) from None


def _named(error: ApiError) -> ApiError:
    """The error with this request's own names."""
    for old, new in (("messages[0].content[", f"{FIELD}["), ("messages", FIELD)):
        error.message = error.message.replace(old, new)
        error.param = (error.param or FIELD).replace(old, new)
    return error
