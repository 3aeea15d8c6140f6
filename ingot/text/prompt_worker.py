"""Long prompts to token ids, in a process of their own.

Covers what the process is asked and what it answers. Tokenizers and templates work for seconds on megabytes
of text; a server must not wait for them, nor share an interpreter with them.

    with LimitedProcess("ingot.text.prompt_worker", LIMITS) as process:
        process.ask({"text": {"folder": "engine/tokenizer", "generation": {}, "chat_template": None},
                     "prompt": "Hi", "add_special_tokens": True, "most": 4096})   # {"count": 1, "ids": …}
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, shown
from ingot.sandbox.limited_process import ProcessLimits
from ingot.text.chat.chat_renderer import ChatFormat, load_chat_format
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

LIMITS = ProcessLimits(seconds=30, memory=4 << 30, nice=10)
_loaded: dict[str, tuple[Tokenizer, ChatFormat | None]] = {}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """``count`` and ``ids`` (int32 in base64) of a ``prompt``, or of ``messages`` with ``variables``; no ids
    where there are more than ``most``. ``places``: of the parts in ``inputs``, as ``placed``. Or the
    ``error``: its parts by name.
    """
    try:
        places: list[int] = []
        tokenizer, chat = _sides(question["text"])
        if "messages" not in question:
            ids = tokenizer.encode(question["prompt"], add_special_tokens=question["add_special_tokens"])
        else:
            assert chat is not None, "who asks knows the chat format"
            messages = with_inputs(question["messages"], question.get("inputs", ()))
            pieces = chat.prompt_pieces(messages, tokenizer, variables=question["variables"])
            ids, places = placed(pieces)
    except IngotError as error:
        seen, allowed = (None if value is None else shown(value) for value in (error.seen, error.allowed))
        return {"error": {"what": error.what, "seen": seen, "allowed": allowed, "fix": error.fix}}
    if len(ids) > question["most"]:
        return {"count": len(ids)}
    return {
        "count": len(ids),
        "ids": base64.b64encode(array("i", ids).tobytes()).decode(),
        "places": places,
    }


def placed(pieces: Sequence[list[int] | Input]) -> tuple[list[int], list[int]]:
    """All ids, and how many of them are before each input."""
    ids: list[int] = []
    places: list[int] = []
    for piece in pieces:
        if isinstance(piece, Input):
            places.append(len(ids))
        else:
            ids += piece
    return ids, places


def with_inputs(messages: list[dict[str, Any]], inputs: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The messages, in which these parts (message and part) become inputs of no features."""
    for message, part in inputs:
        messages[message]["content"][part] = {"type": "input", "input": Input(None)}
    return messages


def ids_of(found: str) -> list[int]:
    """The ids of an answer."""
    return array("i", base64.b64decode(found)).tolist()


def _sides(text: dict[str, Any]) -> tuple[Tokenizer, ChatFormat | None]:
    """Tokenizer and chat format, loaded once."""
    name = str(text)
    if name not in _loaded:
        folder = Path(text["folder"])
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None, "who asks has loaded it"
        _loaded[name] = tokenizer, load_chat_format(folder, text["generation"], text["chat_template"])
    return _loaded[name]
