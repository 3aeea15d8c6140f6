"""Log-probabilities in the shape of ``/v1/completions``.

Owns the four lists, and where each token begins in the text. Knows no engine.

    LogprobLists(tokenizer).of(tokens)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ingot.llm.outputs import TokenLogprobs
from ingot.processors.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST)


class LogprobLists:
    """Of one choice, part after part; offsets count characters from the start of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of an echoed prompt; nothing is known of its first token."""
        first = {
            "tokens": [self._tokenizer.token_text(ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(ids[0])],
        }
        return joined(first, self.of(scores))

    def of(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens."""
        return {
            "tokens": [self._tokenizer.token_text(one.token_id) for one in tokens],
            "token_logprobs": [finite(one.logprob) for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens],
            "text_offset": [self._advance(one.token_id) for one in tokens],
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """By text, the likeliest of equal texts; the chosen token is among them."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._tokenizer.token_text(token), finite(logprob))
        return found

    def _advance(self, token: int) -> int:
        """Where a token begins; the next one begins behind it."""
        begin = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return begin


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts as one."""
    return {name: first[name] + second[name] for name in first}
