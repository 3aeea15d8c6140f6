"""Loads and tries a tokenizer in a process with limits (``LimitedProcess``)."""

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
_MOST_STRINGS = 64  # strings of the files themselves, each this long at most


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Load the tokenizer in ``folder``, encode texts and decode their ids. Errors are ignored: the caller
    gets the same ones when it loads the tokenizer. A library that runs out of memory ends its process.
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
    """Runs of a character of every Unicode category and of all ASCII, words, and strings of the files."""
    letters = {
        unicodedata.category(chr(code)): chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000
    }
    for one in [*map(chr, range(128)), *letters.values(), "你", "한", "😀", "\u3000", "\ufeff", "\ufdfa"]:
        yield f"{one * _RUN}!{one} {one}\n"
    yield "It's 3 o'clock; they'll pay $1,234 (12 €)…\t\r\n\n  Grüße, Ελλάδα, привет, שלום, नमस्ते, 你好吗？"
    own = [*tokenizer.special_tokens, *(tokenizer.patterns() if isinstance(tokenizer, FastTokenizer) else ())]
    for text in own[:_MOST_STRINGS]:
        with suppress(UnicodeEncodeError):
            text.encode()
            yield text[:_MOST_STRINGS] * _RUN
