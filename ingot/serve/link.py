"""The engine process's end of the socket.

Owns sending and receiving without a thread of its own: between two steps what has come is read, and as much
is written as the socket takes. A server that reads slowly holds nobody up until ``MOST_UNSENT`` bytes wait
for it. Knows no message.

    link.send(Step([], [], gauges))
    for message in link.exchange(wait=True): ...
"""

from __future__ import annotations

import contextlib
import select
import socket

from ingot.serve.protocol import FromEngine, Splitter, ToEngine, frame

MOST_UNSENT = 64 << 20
_CHUNK = 1 << 20


class LinkClosedError(Exception):
    """The server has gone."""


class Link:
    """Messages over a connected stream socket; for one thread, but for ``wake``."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._splitter: Splitter[ToEngine] = Splitter(ToEngine)
        self._unsent = bytearray()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def wake(self) -> None:
        """End a wait of ``exchange``, from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._waker.send(b"!")

    def send(self, message: FromEngine) -> None:
        """Queue a message; ``exchange`` sends it."""
        self._unsent += frame(message)

    def exchange(self, *, wait: bool) -> list[ToEngine]:
        """Send what can be sent and return what has come; ``wait`` until something has, or ``wake``.

        Raises:
            LinkClosedError: the server has gone.
            FrameError: what came is no message.
        """
        while True:
            self._send()
            found = self._receive()
            if found or not (wait or len(self._unsent) > MOST_UNSENT):
                return found
            if self._sleep() and len(self._unsent) <= MOST_UNSENT:
                return []

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._unsent:
            self._send()
            select.select([], [self._socket] if self._unsent else [], [], 1.0)

    def _sleep(self) -> bool:
        """Until the socket has something, or takes something that is to be sent; or ``wake``: then True."""
        select.select([self._socket, self._woken], [self._socket] if self._unsent else [], [])
        with contextlib.suppress(BlockingIOError):
            return bool(self._woken.recv(_CHUNK))
        return False

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosedError from error

    def _receive(self) -> list[ToEngine]:
        found: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return found
            except OSError as error:
                raise LinkClosedError from error
            if not data:
                raise LinkClosedError
            found += self._splitter.feed(data)
