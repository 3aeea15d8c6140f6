"""One process of an engine, from its start to its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from typing import cast

import msgspec

from ingot.errors import EngineError
from ingot.serve.engine_calls.blank_process import BlankProcess
from ingot.serve.engine_calls.process_protocol import (
    Failed,
    FrameError,
    FromEngine,
    LoadEngine,
    Ready,
    Splitter,
    StepNews,
    ToEngine,
    frame,
)
from ingot.serve.engine_calls.speech_windows import Windows

_END_SECONDS = 5.0  # for a process to end by itself
_CHECK_SECONDS = 0.05


class EngineRun(asyncio.Protocol):
    """A process that has been started. ``receive`` is called with the news of each step; ``lost`` once, at
    once, when a loaded engine can no longer be used, but not by ``close``.
    """

    _process: subprocess.Popen[bytes]
    _transport: asyncio.Transport | None = None

    def __init__(self, name: str, receive: Callable[[StepNews], None], lost: Callable[[str], None]) -> None:
        self._name = name
        self._receive, self._lost = receive, lost
        self._splitter: Splitter[FromEngine] = Splitter(FromEngine)
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()  # the socket
        self._why: str | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        load: LoadEngine,
        windows: Windows | None = None,
        *,
        blank: BlankProcess | None = None,
        receive: Callable[[StepNews], None],
        lost: Callable[[str], None],
    ) -> tuple[EngineRun, Ready]:
        """Start a process, or take a ``blank`` one that has ``windows``, and wait until the engine is loaded;
        a cancelled start ends the process.

        Raises:
            EngineError, OutOfMemoryError: the engine could not be loaded.
            OSError: no process could be started.
        """
        run = cls(name, receive, lost)
        if blank is None:
            blank = BlankProcess(None if windows is None else windows.descriptor, load.device)
        run._process, ours = blank.take()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: run, sock=ours)
            run.send(msgspec.structs.replace(load, features=windows and windows.handle))
            return run, await run._loaded
        except BaseException:
            await run.close()
            raise

    def send(self, *messages: ToEngine) -> None:
        """Send messages in one piece: the engine's next step has all of them."""
        assert self._transport is not None
        self._transport.write(b"".join(map(frame, messages)))

    async def close(self) -> None:
        """End the process by closing its socket, and by a signal if it does not react or is still loading."""
        self._why = self._why or "the engine's process is not needed any more"
        if self._transport is not None:
            self._transport.abort()
        if self._transport is None or self._loaded.cancelled():
            self._process.kill()
        await self._exit_code()

    async def ended(self) -> str:
        """Wait for the end of the process; returns why it ended. It leaves no zombie."""
        await self._closed.wait()
        code = await self._exit_code()
        if self._why is not None:
            return self._why
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        hint = " (the system may be out of memory)" if code == -signal.SIGKILL else ""
        return f"the engine's process was ended by {signal.Signals(-code).name}{hint}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                self._take(message)
        except FrameError as error:
            self._lose(f"the engine's process sent {error}")
            self._process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(None)
        self._closed.set()

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepNews():
                self._receive(message)
            case Ready():
                self._loaded.set_result(message)
            case Failed() if self._loaded.done():
                self._lose(str(message.error()))
            case Failed():
                self._why = message.what
                self._loaded.set_exception(message.error())

    def _lose(self, why: str | None) -> None:
        """The engine can no longer be used; None: its socket was closed."""
        reason = why or "the engine's process has ended"
        if not self._loaded.done():
            self._loaded.set_exception(EngineError(f"{self._name}: {reason}", fix="see what it wrote above"))
        elif self._why is None:
            self._why = why
            self._lost(reason)

    async def _exit_code(self) -> int:
        """Wait for the process, which is killed if it does not end."""
        for _ in range(int(_END_SECONDS / _CHECK_SECONDS)):
            code = self._process.poll()
            if code is not None:
                return code
            await asyncio.sleep(_CHECK_SECONDS)
        self._process.kill()
        return self._process.wait()
