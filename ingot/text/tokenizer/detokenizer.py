"""Text while tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingot.text.tokenizer.tokenizer_base import Tokenizer

_PROMPT_WINDOW = 16
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Returns text as soon as it is certain; all pieces joined are ``tokenizer.decode`` of all ids.

    Args:
        prompt_ids: tokens that the text continues, so that with SentencePiece the first word keeps its
            leading space. Empty: the text starts here.
        skip_special_tokens: as in ``Tokenizer.decode``.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = tokenizer.text_stream()
        self._window = None if tokenizer.joins_bytes else _DecodeWindow(tokenizer)
        self.add(prompt_ids[-_PROMPT_WINDOW:])

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain after ``ids``, perhaps none; never half a character."""
        shown = [i for i in ids if not (self._skip and self._tokenizer.is_special(i))]
        if self._window is not None:
            return "".join(map(self._window.add, shown))
        return self._stream.feed(b"".join(map(self._tokenizer.token_bytes, shown)))

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD. Call once, after the last token."""
        return self._window.flush() if self._window is not None else self._stream.flush()


class _DecodeWindow:
    """For decoders that do not join bytes: the difference between decoding a short window and its start. The
    window starts with the tokens of the last text returned, so each token is decoded after its predecessor.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0
        self._shown = ""

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
