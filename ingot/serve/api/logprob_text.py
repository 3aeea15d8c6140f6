"""Log-probabilities in the shape of ``/v1/completions``."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import chain

from ingot.llm.outputs import TokenLogprobs
from ingot.serve.json_parts import LazyList
from ingot.text.tokenizer.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST)


class LogprobLists:
    """Lists of one choice, part after part; offsets count characters from the start of its text.

    Args:
        first: the first token of an echoed prompt, of which nothing is known; None: nothing is echoed.
        scores: of the prompt's other tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, first: int | None = None, scores: Sequence[TokenLogprobs] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._first, self._scores = first, scores
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[TokenLogprobs]) -> dict[str, LazyList]:
        """Lists of the next tokens, the first time after those of the prompt. The offsets must be read before
        those of the next part.
        """
        first, scores = self._first, self._scores
        self._first, self._scores = None, ()
        begin: list[int] = [] if first is None else [first]
        unknown: list[None] = [None] * len(begin)
        text = self._tokenizer.token_text

        def ids() -> Iterator[int]:
            return chain(begin, (one.token_id for one in chain(scores, tokens)))

        return {
            "tokens": LazyList(lambda: map(text, ids())),
            "token_logprobs": LazyList(
                lambda: chain(unknown, (finite(o.logprob) for o in chain(scores, tokens)))
            ),
            "top_logprobs": LazyList(lambda: chain(unknown, map(self._top, chain(scores, tokens)))),
            "text_offset": LazyList(lambda: map(self._advance, ids())),
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by text, of equal texts the likeliest; the chosen token is among them."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._tokenizer.token_text(token), finite(logprob))
        return found

    def _advance(self, token: int) -> int:
        """Where a token begins; the next one begins behind it."""
        begin = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return begin
