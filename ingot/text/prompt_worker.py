"""Encodes long prompts in a process of its own (``LimitedProcess``), so that a server does not wait."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.sandbox.limited_worker import error_parts
from ingot.text.chat.chat_renderer import ChatFormat, load_chat_format
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

LIMITS = ProcessLimits(seconds=30, memory=4 << 30, nice=10)
_loaded: dict[str, tuple[Tokenizer, ChatFormat | None]] = {}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """``count`` and ``ids`` (int32 in base64) of a ``prompt``, or of ``messages`` with ``variables``; no ids
    where there are more than ``most``. ``places``: of the parts in ``inputs``, as in ``placed``. Or
    ``error``, its parts by name.

        answer({"text": {"folder": "engine/tokenizer", "generation": {}, "chat_template": None},
                "prompt": "Hi", "add_special_tokens": True, "most": 4096})
    """
    text = question["text"]
    name, folder = str(text), Path(text["folder"])
    try:
        if name not in _loaded:
            found = load_tokenizer(folder)
            assert found is not None, "the server has loaded it"
            _loaded[name] = found, load_chat_format(folder, text["generation"], text["chat_template"])
        places: list[int] = []
        tokenizer, chat = _loaded[name]
        if "messages" not in question:
            ids = tokenizer.encode(question["prompt"], add_special_tokens=question["add_special_tokens"])
        else:
            assert chat is not None, "the server knows the chat format"
            messages = with_inputs(question["messages"], question.get("inputs", ()))
            pieces = chat.prompt_pieces(messages, tokenizer, variables=question["variables"])
            ids, places = placed(pieces)
    except IngotError as error:
        return {"error": error_parts(error)}
    if len(ids) > question["most"]:
        return {"count": len(ids)}
    data = base64.b64encode(array("i", ids).tobytes()).decode()
    return {"count": len(ids), "ids": data, "places": places}


def placed(pieces: Sequence[list[int] | Input]) -> tuple[list[int], list[int]]:
    """All ids, and how many of them precede each input."""
    ids: list[int] = []
    places: list[int] = []
    for piece in pieces:
        if isinstance(piece, Input):
            places.append(len(ids))
        else:
            ids += piece
    return ids, places


def with_inputs(messages: list[dict[str, Any]], inputs: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The messages with the parts at (message, part) replaced by inputs without features."""
    for message, part in inputs:
        messages[message]["content"][part] = {"type": "input", "input": Input(None)}
    return messages


def ids_of(found: str) -> list[int]:
    """The ids of an answer."""
    return array("i", base64.b64decode(found)).tolist()
