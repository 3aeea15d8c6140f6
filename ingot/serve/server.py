"""The server's life: start engines, listen, stop.

SIGTERM and Ctrl-C stop accepting and let unfinished answers go on for ``drain_seconds``; a second one ends at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import uvicorn

from ingot.config.allowed_hosts import HostRule
from ingot.config.server_config import ServeConfig
from ingot.errors import ConfigError, EngineError
from ingot.serve.api_errors import stopping
from ingot.serve.app import ServerState, make_app
from ingot.serve.engine_calls.blank_process import BlankProcess
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.garbage_collection import leave_out_what_is_loaded
from ingot.serve.engine_calls.process_protocol import LoadEngine
from ingot.serve.engine_calls.restarts import RestartPolicy
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.http.connections import Accepting, Connection, Connections, raise_file_limit
from ingot.serve.http.http_bodies import HEADER_BYTES
from ingot.serve.http.log_limit import limit_log
from ingot.serve.served_model import ServedModel, TextSide

_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
_UNREAD_BYTES = 128 << 10  # that the system buffers for a client; megabytes by default
_LAST_SECONDS = 5.0  # for the last errors to be read, after the drain


async def serve(
    sides: Sequence[TextSide],
    loads: Mapping[str, LoadEngine],
    config: ServeConfig,
    *,
    api_key: str | None = None,
    blanks: Mapping[str, BlankProcess] | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> bool:
    """Serve models until a signal; returns whether it was Ctrl-C.

    Args:
        sides, loads: of each model; ``loads`` by its name.
        blanks: processes of engines that have been started already, by the model's name.
        on_ready: called with the server's URL once it takes requests.

    Raises:
        ConfigError: the address cannot be listened on.
        EngineError, OutOfMemoryError: an engine could not be loaded, or the last one has died for good.
    """
    limit_log()
    with listening(config) as listener, _Stop() as stop:
        metrics, grammars = Metrics(), GrammarChecks()
        engines: list[EngineClient] = []
        models: dict[str, ServedModel] = {}
        own = {s.name: msgspec.structs.replace(loads[s.name], manifest=s.files.manifest) for s in sides}
        first = blanks or {}
        starts = [
            EngineClient.start(
                *(s.name, own[s.name], config, metrics.of(s.name)),
                *(s.features, RestartPolicy(), first.get(s.name)),
            )
            for s in sides
        ]
        try:
            engines = await stop.or_result(asyncio.ensure_future(_started(starts)))
            models = {
                s.name: ServedModel(s, e, grammars, config) for s, e in zip(sides, engines, strict=True)
            }
            address, port = listener.getsockname()[:2]
            hosts = HostRule.of(address, config.allowed_host)
            server = _Server(ServerState(models, config, metrics), api_key, hosts)
            stop.then(server.stop)
            leave_out_what_is_loaded()
            listener.listen(_BACKLOG)  # from here on clients can connect
            on_ready(f"http://{f'[{address}]' if ':' in address else address}:{port}")
            await server.serve(sockets=[listener])
            server.check_engines()
        except _StoppedError:
            pass
        finally:
            grammars.close()
            for model in models.values():
                model.close()
            await asyncio.gather(*(engine.close() for engine in engines))
        return stop.by_interrupt


async def _started(starts: Sequence[Coroutine[Any, Any, EngineClient]]) -> list[EngineClient]:
    """All engines; where one cannot be loaded, or a signal comes, the others end too."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, EngineClient):
                await found.close()
        raise


@contextlib.contextmanager
def listening(config: ServeConfig) -> Iterator[socket.socket]:
    """A bound socket, so that a taken port (ConfigError) is known before engines are loaded."""
    try:
        infos = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = infos[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        found.bind(address)
    except OSError as error:
        seen = f"{config.host}:{config.port}: {error.strerror or error}"
        raise ConfigError("cannot listen on this address", seen=seen, field=("host", "port")) from None
    with found:
        yield found


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end the process by the signal, not with 0."""

    def __init__(self, state: ServerState, api_key: str | None, hosts: HostRule) -> None:
        self._state = state
        self._connections = Connections(raise_file_limit())
        for model in state.models.values():
            model.engine.on_given_up = self._end_without_engines
        super().__init__(
            uvicorn.Config(
                make_app(state, api_key, hosts),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(state.config.drain_seconds + _LAST_SECONDS),
                backlog=_BACKLOG,
                h11_max_incomplete_event_size=HEADER_BYTES,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the one listening socket."""
        assert sockets is not None
        (listener,) = sockets
        values = {"config": self.config, "server_state": self.server_state, "app_state": {}}
        connect = partial(Connection, **values, connections=self._connections)
        accepting = Accepting(listener, connect, self._connections)
        self.servers = [cast(asyncio.Server, accepting)]
        accepting.start()
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, at_once: bool) -> None:
        """Take no more requests; let those in flight go on to the deadline."""
        self._state.stopping = self.should_exit = True
        self.force_exit = at_once
        loop = asyncio.get_running_loop()
        loop.call_later(0 if at_once else self._state.config.drain_seconds, self._fail_all)

    def check_engines(self) -> None:
        """Raises EngineError where the server has ended because every engine has died for good."""
        if self._has_no_engine():
            lost = "; ".join(f"{name}: {model.engine.lost}" for name, model in self._state.models.items())
            raise EngineError("every engine has died", seen=lost, fix="see the log; start the server again")

    def _end_without_engines(self) -> None:
        if self._has_no_engine():
            self._state.stopping = self.should_exit = True

    def _has_no_engine(self) -> bool:
        engines = [model.engine for model in self._state.models.values()]
        return bool(engines) and all(engine.given_up for engine in engines)

    def _fail_all(self) -> None:
        for model in self._state.models.values():
            model.engine.fail_all(stopping())


class _StoppedError(Exception):
    """A signal came before the engines were loaded."""


class _Stop:
    """SIGTERM and Ctrl-C while it is open."""

    def __init__(self) -> None:
        self.by_interrupt = False
        self._first = asyncio.Event()
        self._stop: Callable[..., None] = lambda at_once: None

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._come, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def then(self, stop: Callable[..., None]) -> None:
        """Set what a signal does from now on; ``at_once``: it is the second one."""
        self._stop = stop

    async def or_result(self, work: asyncio.Future[list[EngineClient]]) -> list[EngineClient]:
        """What ``work`` returns; a signal before that cancels it and raises _StoppedError."""
        waiting = asyncio.ensure_future(self._first.wait())
        both: set[asyncio.Future[Any]] = {work, waiting}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _StoppedError
            return work.result()
        finally:
            waiting.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _come(self, number: int) -> None:
        at_once = self._first.is_set()
        self.by_interrupt |= number == signal.SIGINT
        self._first.set()
        self._stop(at_once=at_once)
