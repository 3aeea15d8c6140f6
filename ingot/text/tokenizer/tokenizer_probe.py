"""What a tokenizer's files do to a process that loads them: tried in one with limits (``LimitedProcess``).

Covers the texts to try. A library that runs out of memory ends its process without an exception.

    answer({"folder": "checkpoint"})
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.text.tokenizer.tokenizer import load_tokenizer
from ingot.text.tokenizer.tokenizer_base import Tokenizer
from ingot.text.tokenizer.tokenizer_fast import FastTokenizer

_RUN = 48  # repeats: a pattern that tries every way to cut a run takes 2^48 steps
_MOST_TOLD = 64  # strings of the files themselves, each this long at most


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Load the tokenizer in ``folder``, encode texts and decode their ids.

    Errors are ignored: the caller gets the same ones when it loads the tokenizer.
    """
    with suppress(IngotError):
        tokenizer = load_tokenizer(Path(question["folder"]))
        if tokenizer is None:
            return {}
        for text in _texts(tokenizer):
            with suppress(IngotError):
                tokenizer.decode(tokenizer.encode(text))
    return {}


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """A run of a character of every Unicode category and of all ASCII, words, and what the files look for."""
    letters = {
        unicodedata.category(chr(code)): chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000
    }
    for one in [*map(chr, range(128)), *letters.values(), "你", "한", "😀", "\u3000", "\ufeff", "\ufdfa"]:
        yield f"{one * _RUN}!{one} {one}\n"
    yield "It's 3 o'clock; they'll pay $1,234 (12 €)…\t\r\n\n  Grüße, Ελλάδα, привет, שלום, नमस्ते, 你好吗？"
    own = [*tokenizer.special_tokens, *(tokenizer.patterns() if isinstance(tokenizer, FastTokenizer) else ())]
    for text in own[:_MOST_TOLD]:
        with suppress(UnicodeEncodeError):
            text.encode()
            yield text[:_MOST_TOLD] * _RUN
