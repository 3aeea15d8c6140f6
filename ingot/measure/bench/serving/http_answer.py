"""One streamed answer of a server: the times of its chunks, and how it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ingot.config.files.json_text import JsonError, parse_json

_DONE = b"[DONE]"
_MOST_TEXT = 300  # characters of a server's words
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta


class StreamError(Exception):
    """A request failed; the report counts by ``kind``, such as ``HTTP 429``."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message[:_MOST_TEXT]


@dataclass(frozen=True)
class HttpAnswer:
    """Times of one request in seconds.

    Attributes:
        sent: the clock just before the request is sent, and a connection made if there is none.
        late_s: from the planned time to ``sent``.
        ttft_s: from ``sent`` to the first token's chunk.
        e2e_s: from ``sent`` to the last chunk with a choice.
        gaps_s: between two chunks with tokens (ITL).
        tokens: output tokens by the server's count, or chunks without one (``counted``).
        prompt_tokens: by the server's count, or None.
        error, message: the kind of failure and its text, or None. A failed request has no other figures.
    """

    sent: float
    late_s: float
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    tokens: int = 0
    counted: bool = False
    prompt_tokens: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def chunks(self) -> int:
        """Chunks with tokens."""
        return len(self.gaps_s) + 1

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    def to_json(self, start: float) -> dict[str, Any]:
        """Rounded to microseconds; ``start``: the clock when the load began."""
        found: dict[str, Any] = {"sent_s": round(self.sent - start, 6), "late_s": round(self.late_s, 6)}
        if self.error is not None:
            return found | {"error": self.error, "told": self.message}
        return found | {
            "ttft_s": round(self.ttft_s, 6),
            "e2e_s": round(self.e2e_s, 6),
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "itl_s": [round(gap, 6) for gap in self.gaps_s],
        }


@dataclass
class Stream:
    """The server-sent events of one answer; ``sent``: the clock before the request."""

    sent: float
    _rest: bytes = b""
    _arrivals: list[float] = field(default_factory=list)
    _last: float = 0.0
    _tokens: int | None = None
    _prompt_tokens: int | None = None
    _ended: bool = False

    def feed(self, data: bytes, now: float) -> None:
        """Take the data of one read, whose chunks all arrived ``now``.

        Raises:
            StreamError: the server reports an error, or sends something else than a chunk.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def answer(self, late_s: float) -> HttpAnswer:
        """The whole answer.

        Raises:
            StreamError: it broke off, or has no tokens.
        """
        if not self._ended and not self._rest.endswith(_DONE):
            message = f"no [DONE] and no finish_reason after {len(self._arrivals)} chunks"
            raise StreamError("broken stream", message)
        if not self._arrivals:
            raise StreamError("no tokens", "the stream ended without any")
        return HttpAnswer(
            self.sent,
            late_s,
            self._arrivals[0] - self.sent,
            self._last - self.sent,
            tuple(after - before for before, after in pairwise(self._arrivals)),
            self._tokens or len(self._arrivals),
            not self._tokens,
            self._prompt_tokens,
        )

    def _event(self, text: bytes, now: float) -> None:
        if text == _DONE:
            self._ended = True
            return
        try:
            event = parse_json(text)
        except JsonError as error:
            raise StreamError("not JSON", f"{error}: {text[:80]!r}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise StreamError("error in the stream", error_text(event))
        try:
            self._chunk(event, now)
        except (AttributeError, KeyError, TypeError):
            raise StreamError("not a chunk", text[:_MOST_TEXT].decode("utf-8", "replace")) from None

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        usage, choices = event.get("usage"), event.get("choices")
        if usage:
            self._tokens, self._prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if choices:
            self._last = now
            self._ended = self._ended or choices[0].get("finish_reason") is not None
            delta = choices[0].get("delta") or {}
            has_text = choices[0].get("text") or any(delta.get(name) for name in _TEXTS)
            # A token may have no text (half a character), as have a chat's role and the end of an answer.
            if has_text or (choices[0].get("finish_reason") is None and "role" not in delta):
                self._arrivals.append(now)


def error_text(value: Any) -> str:
    """The message of an OpenAI error, or the value as it is."""
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)
