"""Fields of a body that the server ignores: in a header of the answer, and once an hour in the log."""

from __future__ import annotations

import difflib
import functools
import logging
import time

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.errors import shown

IGNORED = "X-Ingot-Ignored"
_MOST_NAMES, _MOST_LENGTH = 16, 64  # in one header, and of one name
_HOUR = 3600.0  # seconds, in which the log has a name once
_MOST_LOGGED = 100  # names in it; what strangers send fills neither the log nor the memory
# OpenAI's clients send these, and no answer depends on them here.
_WITHOUT_EFFECT = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "truncation")
)
_Keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
_log = logging.getLogger(__name__)


class IgnoredFields:
    """Adds the header to answers of requests that ``note_ignored`` was called for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def naming(message: Message) -> None:
            names = scope["state"].get(IGNORED) if message["type"] == "http.response.start" else None
            if names:
                header = IGNORED.lower().encode(), ", ".join(map(_plain, names[:_MOST_NAMES])).encode()
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        scope.setdefault("state", {})
        await self._app(scope, receive, naming if scope["type"] == "http" else send)


def note_ignored(request: Request, kind: type[msgspec.Struct], data: bytes) -> None:
    """Keep the names of a body's fields that ``kind`` does not have, and log each name once an hour."""
    known = _names(kind)
    try:
        given = _Keys.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # whoever reads the body says so
        return
    names = [name for name in given if name not in known]
    setattr(request.state, IGNORED, names)
    for name in names:
        if name not in _WITHOUT_EFFECT:
            _log_once(name[:_MOST_LENGTH], kind)


@functools.cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


_logged: set[tuple[str, type]] = set()
_hour = -_HOUR  # when the current one began, monotonic


def _log_once(name: str, kind: type[msgspec.Struct]) -> None:
    global _hour
    if time.monotonic() - _hour >= _HOUR:
        _hour = time.monotonic()
        _logged.clear()
    if (name, kind) in _logged or len(_logged) > _MOST_LOGGED:
        return
    _logged.add((name, kind))
    if len(_logged) > _MOST_LOGGED:
        what = (
            "clients sent more than %d names of fields that are ignored; others are not logged for up to %s"
        )
        _log.warning(what, _MOST_LOGGED, "an hour")
        return
    near = difflib.get_close_matches(name, _names(kind), n=1)
    _log.warning(
        "a client sent the field %s, which is ignored%s", shown(name), f" (is it {near[0]}?)" if near else ""
    )


def _plain(name: str) -> str:
    """A name as a header may have it: printable ASCII, without commas."""
    cut = name[:_MOST_LENGTH].encode("ascii", "backslashreplace").decode()
    return "".join(c if c.isprintable() and c != "," else f"\\x{ord(c):02x}" for c in cut)
