"""Responses to Triton, sent by one thread; another asks Triton which requests were cancelled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ingot.serve.api_errors import ApiError

_LONGEST = 0.05  # seconds between two looks at the requests while no step ends
_log = logging.getLogger(__name__)


@dataclass
class Part:
    """What one response says. ``finish_reason``: in an answer's last."""

    text: str = ""
    num_tokens: int = 0
    num_input_tokens: int = 0
    finish_reason: str | None = None


class Channel(Protocol):
    """A request's way back to Triton. Each call waits for Triton."""

    def send(self, part: Part) -> None:
        """Send a response; the last if it has a finish reason."""

    def fail(self, error: ApiError) -> None:
        """Send the last response: an error."""

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request; may not be asked after the last response."""


class Reply:
    """The answer to one request. What comes while its last response is being sent goes out as one.
    ``closed``: the last response was sent.
    """

    def __init__(self, channel: Channel, queue: SimpleQueue[Reply | None], stepped: threading.Event) -> None:
        self._channel = channel
        self._queue = queue
        self._stepped = stepped
        self._on_cancel: Callable[[], object] | None = None
        self._lock = threading.Lock()  # of what waits to be sent
        self._open = threading.Lock()  # held while calling Triton, so that nothing follows the last
        self._part = Part()
        self.num_input_tokens = 0
        self._error: ApiError | None = None
        self._queued = self._ended = False
        self.closed = False

    def on_cancel(self, call: Callable[[], object]) -> None:
        """Have ``call`` called once, from another thread, when the client cancels the request."""
        self._on_cancel = call

    def stepped(self) -> None:
        """Note that the engine has made a step for it."""
        self._stepped.set()

    def add(self, text: str, num_tokens: int, finish_reason: str | None = None) -> None:
        """Some of the answer; all of it has come when there is a finish reason."""
        with self._lock:
            self._part.text += text
            self._part.num_tokens += num_tokens
            self._part.finish_reason = finish_reason
            self._hand_over(finish_reason is not None)

    def fail(self, error: ApiError) -> None:
        """End with an error, if it has not ended; text that waits is sent first."""
        with self._lock:
            if not self._ended:
                self._error = error
                self._hand_over(True)

    def send(self) -> None:
        """Send what waits; waits for Triton."""
        with self._lock:
            part, self._part = self._part, Part()
            error, ended = self._error, self._ended
            self._queued = False
        if self.closed:
            return
        part.num_input_tokens = self.num_input_tokens
        with self._open:
            self.closed = ended
            try:
                if part.text or part.finish_reason is not None:
                    self._channel.send(part)
                if error is not None:
                    self._channel.fail(error)
            except Exception:
                _log.exception("a response could not be sent")
                self._cancel()

    def look(self) -> None:
        """Ask whether the client has cancelled; waits for Triton."""
        with self._open:
            try:
                given_up = not self.closed and self._channel.is_cancelled()
            except Exception:
                _log.exception("Triton could not be asked about a request")
                given_up = True
        if given_up:
            self._cancel()

    def _hand_over(self, is_last: bool) -> None:
        self._ended = self._ended or is_last
        if not self._queued and (is_last or self._part.text):
            self._queued = True
            self._queue.put(self)

    def _cancel(self) -> None:
        call, self._on_cancel = self._on_cancel, None
        if call is not None:
            call()


class Replies:
    """All replies in flight, and the threads that serve them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Reply | None] = SimpleQueue()
        self._stepped = threading.Event()
        self._lock = threading.Condition()
        self._in_flight: set[Reply] = set()
        self._stopping = False
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._send, self._watch)]
        for thread in self._threads:
            thread.start()

    def open(self, channel: Channel) -> Reply:
        reply = Reply(channel, self._queue, self._stepped)
        with self._lock:
            self._in_flight.add(reply)
            self._lock.notify()
        return reply

    def close(self) -> None:
        """Send what waits, and end the threads."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        while (reply := self._queue.get()) is not None:
            reply.send()
            if reply.closed:
                with self._lock:
                    self._in_flight.discard(reply)

    def _watch(self) -> None:
        """Look at each request once a step, in the middle of it, and for a third of the time at most: to ask
        costs about as much as to send.
        """
        last, took = time.monotonic(), 0.0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._in_flight or self._stopping)
                if self._stopping:
                    return
            self._stepped.wait(_LONGEST)
            now = time.monotonic()
            time.sleep(max(min(now - last, _LONGEST) / 2, 2 * took))
            last = now
            self._stepped.clear()
            with self._lock:
                replies = list(self._in_flight)
            begin = time.monotonic()
            for reply in replies:
                reply.look()
            took = time.monotonic() - begin
