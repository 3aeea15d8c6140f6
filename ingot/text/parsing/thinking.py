"""Separates an answer's reasoning from its content by the ``<think>`` tags of Qwen3 and DeepSeek-R1."""

from __future__ import annotations

from typing import NamedTuple

from ingot.text.stop_strings import partial_match

OPEN, CLOSE = "<think>", "</think>"


class ThoughtSplit(NamedTuple):
    """What a piece of text adds to reasoning and content."""

    reasoning: str = ""
    content: str = ""


def opens_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends inside a block that it has opened."""
    return prompt_text.rstrip().endswith(OPEN)


class ThinkingSplitter:
    """Splits an answer, piece by piece, at the end of its reasoning; the result does not depend on the
    pieces.

    A block counts only at the start of the answer; later tags are content. An answer that ends inside its
    block is all reasoning. Line breaks next to the tags belong to neither part.

    Args:
        opened: the prompt ends with ``<think>``, so the answer begins inside the block.

    ``ThinkingSplitter().feed("<think>\\nHm.\\n</think>\\n\\nYes") == ThoughtSplit("Hm.", "Yes")``
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._state = "thought" if opened else "start"
        self._held: list[str] = []  # white space that may stand before a tag
        self._text = ""  # what follows it and is not returned yet
        self._bare = True  # line breaks at the start of a part are dropped

    def feed(self, text: str) -> ThoughtSplit:
        """What is certain after ``text``."""
        self._text += text
        return self._step(final=False)

    def flush(self) -> ThoughtSplit:
        """What was held back. Call once, after the last piece."""
        return self._step(final=True)

    def _step(self, *, final: bool) -> ThoughtSplit:
        if self._state == "start":
            self._start(final=final)
        reasoning = self._thought(final=final) if self._state == "thought" else ""
        content = ""
        if self._state == "content":
            text, self._text = self._text, ""
            content = self._without_breaks(text)
        return ThoughtSplit(reasoning, content)

    def _start(self, *, final: bool) -> None:
        text = self._text.lstrip()
        self._held.append(self._text[: len(self._text) - len(text)])
        self._text = text
        if text.startswith(OPEN):
            self._held.clear()
            self._text, self._state = text.removeprefix(OPEN), "thought"
        elif final or not OPEN.startswith(text):
            self._text, self._state, self._bare = self._take_held() + text, "content", False

    def _thought(self, *, final: bool) -> str:
        at = self._text.find(CLOSE)
        if at >= 0:
            shown = self._text[:at].rstrip("\n")
            found = self._without_breaks(self._take_held() + shown) if shown else ""
            self._held.clear()
            self._text, self._state, self._bare = self._text[at + len(CLOSE) :], "content", True
            return found
        keep = 0 if final else partial_match(self._text, CLOSE)
        certain = self._text[: len(self._text) - keep]
        shown = certain if final else certain.rstrip("\n")
        found = self._without_breaks(self._take_held() + shown) if shown or final else ""
        self._held.append(certain[len(shown) :])
        self._text = self._text[len(certain) :]
        return found

    def _take_held(self) -> str:
        found = "".join(self._held)
        self._held.clear()
        return found

    def _without_breaks(self, text: str) -> str:
        if self._bare:
            text = text.lstrip("\n")
            self._bare = not text
        return text
