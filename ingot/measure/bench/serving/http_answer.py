"""One request to a server, seen from outside: when its chunks came, and how it failed.

Owns what counts as a token's chunk, and the times that follow. Knows no HTTP.

    stream = Stream(sent=clock())
    for data in ...: stream.feed(data, clock())
    answer = stream.answer(late_s=0.0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ingot.config.files.json_text import JsonError, parse_json

_DONE = b"[DONE]"
_MOST_TEXT = 300  # characters of a server's words
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta


class StreamError(Exception):
    """A request failed.

    Args:
        kind: what the report counts, such as ``HTTP 429``.
        message: the server's words, or the library's.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message[:_MOST_TEXT]


@dataclass(frozen=True)
class HttpAnswer:
    """Times of one request in seconds.

    Attributes:
        sent: on the clock, just before the request is sent; a connection that must be made counts.
        late_s: how long after its planned time that was.
        ttft_s: from there to the first token's chunk.
        e2e_s: from there to the last chunk with a choice.
        gaps_s: between two chunks with tokens (ITL).
        tokens: output tokens as the server counts them, or chunks where it does not (``counted``).
        prompt_tokens: as the server counts them; None where it does not.
        error, message: the kind of failure and its words; None where there is none. A failed request has no
            other figures.
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
        """To the microsecond; ``start`` is the load's beginning on the clock."""
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
    """Server-sent events of one answer as they come; ``sent`` is the clock's reading before the request."""

    sent: float
    _rest: bytes = b""
    _arrivals: list[float] = field(default_factory=list)
    _last: float = 0.0
    _tokens: int | None = None
    _prompt_tokens: int | None = None
    _ended: bool = False

    def feed(self, data: bytes, now: float) -> None:
        """What one read gave. All its chunks count as arrived ``now``.

        Raises:
            StreamError: the server reports an error, or sends what is no chunk.
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
            if _has_token(choices[0]):
                self._arrivals.append(now)


def error_text(value: Any) -> str:
    """The message of an OpenAI error, or the value as it is."""
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _has_token(choice: dict[str, Any]) -> bool:
    """Text, or a token without any (half a character): not the role that begins a chat, nor the bare end."""
    delta = choice.get("delta") or {}
    if choice.get("text") or any(delta.get(name) for name in _TEXTS):
        return True
    return choice.get("finish_reason") is None and "role" not in delta
