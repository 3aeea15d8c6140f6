"""Who may ask the page's own server for what.

Gradio serves more than the page asks for: uploads for every component, calls by API.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.allowed_hosts import HostRule

MOST_UPLOAD = 32 << 20  # bytes of an upload
MOST_FILES = 8  # of an upload
MOST_UPLOADS = 4  # at once
MOST_KEPT_BYTES, MOST_KEPT_FILES = 512 << 20, 256  # of all readers, until they are deleted
_FRAME_BYTES = 64 << 10  # of an upload, beside its files
_POSTS = re.compile(r"/gradio_api/(queue/join|run/[^/]*|cancel|reset)/?")
_UPLOAD = re.compile(r"/gradio_api/upload/?")
_READS = ("GET", "HEAD")
_FILE = b"filename="


@dataclass
class DoorRules:
    """What is open: the ``hosts`` that the page answers to, which may change while it runs, and uploads to a
    ``folder`` where a model of the server ``takes_files``.
    """

    hosts: HostRule
    takes_files: bool
    folder: Path


class Doors:
    """The page's application behind the rules."""

    def __init__(self, app: Any, rules: DoorRules) -> None:
        self._app = app
        self._rules = rules
        self._uploads = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(scope, send, *refusal)
        elif scope["method"] == "POST" and _UPLOAD.fullmatch(scope["path"]):
            await self._upload(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._rules.hosts.refusal(headers.get(b"host"), headers.get(b"origin"))
        if refusal is not None:
            return 403, refusal
        if scope["type"] != "http":
            return 403, "the page has no WebSocket"
        method, path = scope["method"], scope["path"]
        if method in _READS or (method == "POST" and _POSTS.fullmatch(path)):
            return None
        if method != "POST" or not _UPLOAD.fullmatch(path):
            return 403, f"the page does not take {method} here"
        if not self._rules.takes_files:
            return 403, "no model of this server takes files"
        length = headers.get(b"content-length", "")
        if not length.isdecimal():
            return 411, "an upload needs a Content-Length"
        if int(length) > MOST_UPLOAD + _FRAME_BYTES:
            return 413, f"the upload is larger than {MOST_UPLOAD >> 20} MiB"
        if self._uploads >= MOST_UPLOADS:
            return 429, "too many uploads at once; try again later"
        sizes = [file.stat().st_size for file in self._rules.folder.rglob("*") if file.is_file()]
        if len(sizes) >= MOST_KEPT_FILES or sum(sizes) >= MOST_KEPT_BYTES:
            return 507, "the page keeps too many files; they are deleted after an hour"
        return None

    async def _upload(self, scope: Any, receive: Any, send: Any) -> None:
        count, tail = 0, b""

        async def counted() -> Any:
            nonlocal count, tail
            message = await receive()
            data = tail + message.get("body", b"")
            count += data.count(_FILE)
            tail = data[len(data) - len(_FILE) + 1 :]
            if count > MOST_FILES:
                raise _TooManyFilesError
            return message

        self._uploads += 1
        try:
            await self._app(scope, counted, send)
        except _TooManyFilesError:
            await _refuse(scope, send, 413, f"an upload has at most {MOST_FILES} files")
        finally:
            self._uploads -= 1


class _TooManyFilesError(Exception):
    """An upload has more files than it may."""


async def _refuse(scope: Any, send: Any, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": why}).encode()})
