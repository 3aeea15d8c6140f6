"""The search for stop strings in a text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first stop string to be complete.

    Of several that complete at the same character, the longest wins. The result does not depend on how the
    text was cut into pieces.

        stops = StopStrings(["###"]); stops.feed("Hi#") == ("Hi", None); stops.feed("##") == ("", "###")
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._hit: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string once it was found.

        Held back is only what could still be the start of a stop string. After a hit nothing more is shown.
        """
        if self._hit is not None:
            return "", self._hit
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._hit = min(found)
            self._held = ""
            return text[:at], self._hit
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, when the text ended without a hit."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that starts ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
