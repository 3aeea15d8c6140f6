"""Connections of clients: accepted, bounded, and closed when they wait for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ingot.serve.api_errors import unavailable

# From a connection's start, or its next request's first byte, to the end of the headers.
HEADER_SECONDS = 20.0
UNREAD_SECONDS = 60.0  # a client has for the rest of its last answer
MOST_CONNECTIONS = 4096
_OWN_FILES = 320  # descriptors for engines, limited processes, and uploads
_MOST_FILES = 1 << 16
_AT_ONCE = 64  # connections accepted before other events have their turn
_PAUSE_SECONDS = 1.0
_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns how many connections fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return min(MOST_CONNECTIONS, max(files - _OWN_FILES, files // 2))


class Connections:
    """All connections of a server, at most ``most``. Those without a whole request come in the order in which
    they began to wait, and make room for new ones.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def note(self, connection: Connection, *, waits: bool) -> None:
        """Note whether a connection waits for the rest of a request, or for the next one."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def make_room(self) -> bool:
        """Whether a new connection fits; the one that has waited longest is closed if it must be."""
        return len(self._open) < self.most or self.close_one()

    def close_one(self) -> bool:
        """Close the connection that has waited longest; False if all have a whole request."""
        if not self._waiting:
            return False
        oldest = next(iter(self._waiting))
        self.remove(oldest)
        oldest.transport.abort()
        return True


class Connection(H11Protocol):
    """One connection. Headers must arrive in time, and so must the reading of the last answer."""

    def __init__(self, *args: Any, connections: Connections, **values: Any) -> None:
        super().__init__(*args, **values)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            # Small parts are sent without waiting for the client's acknowledgement of the last one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._all.add(self)
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._end_by(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # the rest of the answer is still on its way
            self._end_by(UNREAD_SECONDS)
        else:
            self._note()

    def timeout_keep_alive_handler(self) -> None:
        """No other request has come; a client that has not read its answer loses the rest of it."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _note(self) -> None:
        """Look at what the connection waits for."""
        answering = self.cycle is not None and not self.cycle.response_complete
        self._all.note(self, waits=not answering or self.cycle.more_body)
        if answering:
            self._end_by(None)
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._end_by(HEADER_SECONDS)

    def _end_by(self, seconds: float | None) -> None:
        """Set the time at which the connection is closed; None: it may stay."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Accepting:
    """Accepts connections of a listening socket; uvicorn ends it as it would an ``asyncio.Server``.

    asyncio's own accepting logs every connection that it has no descriptor for, thousands in a second.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], connections: Connections
    ) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, or go on after a pause."""
        self._retry = None
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Until connections that were accepted last have begun."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, or no memory
                self._pause(error)
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if not self._connections.make_room():
            _refuse(accepted, self._connections.most)
            return
        begin = self._loop.connect_accepted_socket(self._make, accepted)
        task = self._loop.create_task(begin)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _pause(self, error: OSError) -> None:
        """Try again soon: a connection that waits is closed, and its descriptor is free then."""
        _log.warning("a connection cannot be accepted: %s", error.strerror or error)
        self._connections.close_one()
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_PAUSE_SECONDS, self.start)


def _refuse(accepted: socket.socket, most: int) -> None:
    """Say that all connections are taken, and close this one."""
    text = f"the server has {most} connections, all of them with requests; try again later"
    error = unavailable(text, "too_many_connections")
    body = json.dumps(error.body()).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    with accepted, contextlib.suppress(OSError):
        accepted.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
