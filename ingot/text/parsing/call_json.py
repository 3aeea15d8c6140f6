"""Scans the JSON object of one tool call while it arrives."""

from __future__ import annotations

import json
from typing import Literal

from ingot.text.grammar.lark import CALL_END
from ingot.text.stop_strings import partial_match

_SPACE = " \t\r\n"


class CallJson:
    """Scans ``{"name": "…", "arguments": …}`` by strings and brackets; other keys are skipped.

    Attributes:
        state: ``open``; ``closed``: the object is complete; ``broken``: it is invalid, or the end tag came.
        name: None until it has been read.
        saw_end_tag: the end tag came inside arguments whose JSON is broken; it is consumed.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "closed", "broken"] = "open"
        self.name: str | None = None
        self._read: list[str] = []
        self.saw_end_tag = False
        self._next = "{"  # what comes next: {, a key, :, a value, or a comma
        self._key: str | None = None
        self._key_is_first = True
        self._value: list[str] = []  # characters of the current key or name
        self._arguments: list[str] = []  # characters not taken yet
        self._had_arguments = self._is_arguments = False
        self._depth = 0
        self._quoted = self._escaped = self._torn = False

    @property
    def read(self) -> str:
        """The text read so far."""
        return "".join(self._read)

    def feed(self, text: str, place: int = 0) -> int:
        """Read what belongs to the object from ``place`` on; returns the place after it."""
        start = place
        while place < len(text) and self.state == "open":
            place += self._take(text[place])
        self._read.append(text[start:place])
        return place

    def take_arguments(self, *, final: bool = False) -> str:
        """Arguments since the last call. ``final``: with what might be the start of the end tag."""
        text = "".join(self._arguments)
        keep = partial_match(text, CALL_END) if self._torn and self.state == "open" and not final else 0
        shown = text[: len(text) - keep]
        self._arguments = list(text[len(shown) :])
        return shown

    def _take(self, char: str) -> bool:
        """Read a character; False where it is not the object's, or must be read again as what follows."""
        if self._next == "in value":
            return self._in_value(char)
        if char in _SPACE:
            return True
        if self._next in ("key", "value"):
            return self._begin(char)
        expected = {"{": "{", ":": ":", "comma": ",}"}[self._next]
        if char not in expected:
            self.state = "broken"
            return False
        if char == "}":
            self.state = "closed"
        self._next = {"{": "key", ":": "value", ",": "key", "}": "end"}[char]
        return True

    def _begin(self, char: str) -> bool:
        """The first character of a key or a value."""
        if self._next == "key" and char == "}" and self._key_is_first:
            self.state = "closed"
            return True
        if (self._next == "key" and char != '"') or char in ",:}]":
            self.state = "broken"
            return False
        if self._next == "key":
            self._key = None
        self._key_is_first = False
        self._value, self._depth = [], 0
        self._quoted = self._escaped = self._torn = False
        self._is_arguments = self._key == "arguments" and not self._had_arguments
        self._had_arguments |= self._is_arguments
        self._next = "in value"
        return self._in_value(char)

    def _in_value(self, char: str) -> bool:
        first = not self._value
        if not first and not self._quoted and not self._depth and char in _SPACE + ",}]":
            self._end_value()  # a number, true, false or null
            return False
        if not (self._is_arguments and self._value):  # of arguments, one character shows that they have begun
            self._value.append(char)
        if self._is_arguments:
            self._arguments.append(char)
            if self._torn and char == ">" and "".join(self._arguments[-len(CALL_END) :]) == CALL_END:
                del self._arguments[-len(CALL_END) :]
                self.state, self.saw_end_tag = "broken", True
                return True
        self._follow(char)
        if not self._quoted and not self._depth and char in '"}]':
            self._end_value()
        return True

    def _follow(self, char: str) -> None:
        """Strings, brackets, and whether this can still be JSON."""
        if self._quoted:
            self._torn |= char < " "
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        else:
            self._torn |= char == "<"

    def _end_value(self) -> None:
        if self._key is None or self._key == "name":
            try:
                text = json.loads("".join(self._value))
            except (ValueError, RecursionError):
                text = None
            if not isinstance(text, str):
                self.state = "broken"
                return
            if self._key is None:
                self._key, self._next = text, ":"
                return
            self.name = self.name or text
        self._next = "comma"
