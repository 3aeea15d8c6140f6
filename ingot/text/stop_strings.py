"""The search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first complete stop string: of several that end at one character, the longest. The
    result does not depend on how the text was cut into pieces.

        stops = StopStrings(["###"]); stops.feed("Hi#") == ("Hi", None); stops.feed("##") == ("", "###")
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._hit: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string once it is found. Only what may be the start of
        a stop string is held back; after a hit nothing is shown.
        """
        if self._hit is not None:
            return "", self._hit
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._hit = min(found)
            self._held = ""
            return text[:at], self._hit
        held = max((partial_match(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, where the text ended without a hit."""
        held, self._held = self._held, ""
        return held


def partial_match(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that starts ``stop`` and is not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
