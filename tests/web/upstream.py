"""A server that says what a test tells it to.

Owns an HTTP server in threads that speaks the part of OpenAI's API which the page asks for, and remembers
what it was asked. It has no model.

    with upstream([delta("Hello"), end()]) as server: ...
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "served"


def delta(content: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk that adds to an answer."""
    return {"choices": [{"index": 0, "delta": {"content": content, **more}, "finish_reason": None}]}


def end(reason: str = "stop") -> dict[str, Any]:
    """The chunk that ends it."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


@dataclass
class Upstream:
    """What it says, and what it was asked.

    Attributes:
        chunks: events of an answer; a text is sent as it is; an Event is waited for.
        status: other than 200: ``said`` is the answer, with ``headers``.
        forms: what came with a file; ``said`` is the answer to it.
        left: set once a client has left before the end of an answer.
    """

    chunks: Sequence[Any] = ()
    status: int = 200
    said: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    models: Sequence[dict[str, Any]] = ({"id": NAME, "max_model_len": 512},)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    forms: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def upstream(chunks: Sequence[Any] = (), **values: Any) -> Iterator[Upstream]:
    """A server on a free port while the block is open."""
    served = Upstream(chunks, **values)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.keys.append(self.headers["Authorization"])
            self._reply(json.dumps({"object": "list", "data": list(served.models)}).encode())

        def do_POST(self) -> None:
            served.keys.append(self.headers["Authorization"])
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/audio/transcriptions":
                served.forms.append(body)
                self._reply(json.dumps(served.said).encode(), served.status, served.headers)
                return
            served.bodies.append(json.loads(body))
            if served.status != 200:
                self._reply(json.dumps(served.said).encode(), served.status, served.headers)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for chunk in served.chunks:
                    if isinstance(chunk, threading.Event):
                        while not chunk.wait(0.02):
                            self._event(": still here")
                    else:
                        self._event(chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}")
            except OSError:
                served.left.set()

        def _event(self, text: str) -> None:
            self.wfile.write(f"{text}\n\n".encode())
            self.wfile.flush()

        def _reply(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield served
        server.shutdown()
