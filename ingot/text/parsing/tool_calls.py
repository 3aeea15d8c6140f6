"""Parses the tool calls in an answer's text, as Hermes and Qwen write them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ingot.text.grammar.lark import CALL_END, CALL_START
from ingot.text.parsing.call_json import CallJson
from ingot.text.stop_strings import partial_match


@dataclass(frozen=True)
class ContentDelta:
    """Text outside calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a call, once its name is known; ``index`` counts an answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments: JSON text, as the model wrote it."""

    index: int
    text: str


_START, _START_OR_END = re.compile(CALL_START), re.compile(f"{CALL_START}|{CALL_END}")
Delta = ContentDelta | CallStart | ArgumentsDelta


def new_call_id() -> str:
    """A unique id of a call."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Parses one answer. However the text is split, the deltas are the same once those of one kind are
    joined.

    What is not a call stays content: a block whose JSON breaks, or whose answer ends, before a name is known
    is returned as written. After that the arguments are returned as they are, complete or not; a call without
    any has ``{}``. A tag inside a JSON string is text of that string. White space between calls, and around
    the JSON, is dropped.

        ToolCallParser().feed('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
        # [CallStart(0, "call_…", "add"), ArgumentsDelta(0, '{"a": 1}')]
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._held: list[str] = []  # white space that may stand before a tag
        self._text = ""  # what follows it
        self._place = 0  # the text before it has been read
        self._space = ""  # before the current call
        self._call: CallJson | None = None
        self._started = self._has_arguments = False
        self._after_json = False  # the end tag of a call is still to come

    def feed(self, text: str) -> list[Delta]:
        """The deltas that are certain after ``text``."""
        self._text += text
        return self._step(final=False)

    def flush(self) -> list[Delta]:
        """What was held back. Call once, after the last piece."""
        return self._step(final=True)

    def _step(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        more = True
        while more:
            if self._call is None:
                more = self._content(deltas, final=final)
            else:
                more = self._inside(self._call, deltas, final=final)
        self._text, self._place = self._text[self._place :], 0
        return deltas

    def _content(self, deltas: list[Delta], *, final: bool) -> bool:
        """Return text up to the next tag in ``deltas``; True if there is a tag."""
        found = (_START_OR_END if self._after_json else _START).search(self._text, self._place)
        if found is not None:
            self._show(deltas, self._text[self._place : found.start()])
            self._space, self._place = self._take_held(), found.end()
            self._after_json = False
            if found[0] == CALL_START:
                self._call, self._started, self._has_arguments = CallJson(), False, False
            return True
        rest = self._text[self._place :]
        if final:
            rest = self._take_held() + rest
            end = rest.strip()  # of a call: white space, part of its end tag
            is_end = self.num_calls > 0 and (not end or (self._after_json and CALL_END.startswith(end)))
            self._give(deltas, "" if is_end else rest)
            self._place = len(self._text)
        else:
            keep = max(partial_match(rest, tag) for tag in (CALL_START, CALL_END)[: 1 + self._after_json])
            self._show(deltas, rest[: len(rest) - keep])
            self._place = len(self._text) - keep
        return False

    def _show(self, deltas: list[Delta], text: str) -> None:
        """Return text, but hold white space that may precede a tag."""
        shown = text.rstrip()
        if shown:
            self._give(deltas, self._take_held() + shown)
        self._held.append(text[len(shown) :])

    def _take_held(self) -> str:
        found = "".join(self._held)
        self._held.clear()
        return found

    def _inside(self, call: CallJson, deltas: list[Delta], *, final: bool) -> bool:
        """Read a call's text; True if it has ended."""
        self._place = call.feed(self._text, self._place)
        if call.name is not None and not self._started:
            self._started = True
            deltas.append(CallStart(self.num_calls, self._new_id(), call.name))
            self.num_calls += 1
        if self._started:
            self._arguments(deltas, call.take_arguments(final=final))
        if call.state == "open" and not final:
            return False
        if not self._started:  # no call after all
            self._give(deltas, self._space + CALL_START + call.read)
        elif not self._has_arguments:
            self._arguments(deltas, "{}")
        self._after_json = self._started and not call.saw_end_tag
        self._call = None
        return True

    def _arguments(self, deltas: list[Delta], text: str) -> None:
        if text:
            self._has_arguments = True
            deltas.append(ArgumentsDelta(self.num_calls - 1, text))

    def _give(self, deltas: list[Delta], text: str) -> None:
        if text:
            deltas.append(ContentDelta(text))
