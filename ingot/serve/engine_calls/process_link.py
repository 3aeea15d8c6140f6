"""The engine process's end of the socket, read and written between two steps without a thread."""

from __future__ import annotations

import contextlib
import select
import socket

from ingot.serve.engine_calls.process_protocol import FromEngine, Splitter, ToEngine, frame

MOST_UNSENT = 64 << 20
_CHUNK = 1 << 20


class LinkClosedError(Exception):
    """The server has gone."""


class Link:
    """Messages over a connected stream socket; all but ``wake`` is for one thread. A server that reads slowly
    blocks nothing until ``MOST_UNSENT`` bytes wait for it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._splitter: Splitter[ToEngine] = Splitter(ToEngine)
        self._unsent = bytearray()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def wake(self) -> None:
        """End the wait of ``exchange``, from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is awake already
            self._waker.send(b"!")

    def send(self, message: FromEngine) -> None:
        """Queue a message; ``exchange`` sends it."""
        self._unsent += frame(message)

    def exchange(self, *, wait: bool) -> list[ToEngine]:
        """Send what can be sent and return what has come; ``wait`` until something has, or ``wake``. Raises
        LinkClosedError where the server has gone, FrameError where what came is no message.
        """
        while True:
            self._send()
            found = self._receive()
            if found or not (wait or len(self._unsent) > MOST_UNSENT) or self._was_woken():
                return found
            self._wait(reads=[self._socket, self._woken], timeout=None)

    def flush(self) -> None:
        self._send()
        while self._unsent:
            self._wait(reads=[], timeout=1000)
            self._send()

    def _wait(self, reads: list[socket.socket], timeout: int | None) -> None:
        """By ``poll``: an inherited descriptor's number may be beyond what ``select`` takes."""
        poll, events = select.poll(), dict.fromkeys(reads, select.POLLIN)
        if self._unsent:
            events[self._socket] = events.get(self._socket, 0) | select.POLLOUT
        for one, mask in events.items():
            poll.register(one, mask)
        poll.poll(timeout)

    def _was_woken(self) -> bool:
        try:
            return bool(self._woken.recv(_CHUNK))
        except BlockingIOError:
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
