"""Streamed text in lines that end between words."""

from __future__ import annotations

from collections.abc import Callable

_TAB = 8


class WordWrap:
    """Writes text so that no word crosses the right edge; the terminal cuts a word longer than a line.

    A word is written once it has ended, with the spaces before it. A character of two columns (Chinese,
    Japanese) is a word of its own. Line breaks of the text stay.

    Args:
        width: the columns of a line, asked for every word; None: no edge, text is written at once.
    """

    def __init__(self, write: Callable[[str], None], width: Callable[[], int] | None) -> None:
        self._write, self._has_edge = write, width is not None
        self._width = width or (lambda: 0)
        self._column = 0
        self._spaces = self._word = ""
        self._is_long = False  # a part of the word is written already

    def add(self, text: str) -> None:
        """Take the next part of the text; write the words that have ended."""
        ready = "".join(self._after(character) for character in text) if self._has_edge else text
        if ready:
            self._write(ready)

    def end(self) -> None:
        """Write what is left."""
        ready = self._flushed() + self._spaces
        self._column, self._spaces = 0, ""
        if ready:
            self._write(ready)

    def _after(self, character: str) -> str:
        """What may be written after this character."""
        if character == "\n":
            ready = self._flushed() + self._spaces + "\n"
            self._column, self._spaces = 0, ""
            return ready
        if character in " \t":
            ready = self._flushed()
            self._spaces += character
            return ready
        if _columns(character) == 2:
            ready = self._flushed()
            self._word = character
            return ready + self._flushed()
        self._word += character
        if _columns(self._word) < self._width():
            return ""
        ready, self._is_long = self._part(), True
        return ready

    def _flushed(self) -> str:
        """The end of the word."""
        ready, self._is_long = self._part(), False
        return ready

    def _part(self) -> str:
        """The word so far with the spaces before it, or on a new line."""
        if not self._word:
            return ""
        spaces, word, width = self._spaces, self._word, self._width()
        start, length = self._column, _columns(word)
        for space in spaces:
            start = (start // _TAB + 1) * _TAB if space == "\t" else start + 1
        self._spaces = self._word = ""
        if self._is_long:  # the terminal breaks it
            self._column = (start + length - 1) % width + 1
            return word
        if self._column and start + length > width:
            self._column = length
            return "\n" + word
        self._column = start + length
        return spaces + word


def _columns(text: str) -> int:
    from prompt_toolkit.utils import get_cwidth

    return get_cwidth(text)
