"""Connections of the real server without engines: how they are accepted, bounded and closed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ingot.config.allowed_hosts import HostRule
from ingot.config.server_config import ServeConfig
from ingot.serve import server as servers
from ingot.serve.app import ServerState
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.http import connections as rooms
from ingot.serve.http.connections import Accepting, Connection, Connections, raise_file_limit
from ingot.serve.http.log_limit import RepeatLimit
from ingot.serve.server import _Server, listening

HEALTH = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-a: b\r\n"
HOSTS = HostRule.of("127.0.0.1")
SOON = 10.0  # seconds; only a failing test waits this long
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * SOON):
            await test()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def serving(
    listener: socket.socket | None = None, app: Any = None, most: int | None = None
) -> AsyncIterator[tuple[_Server, int]]:
    """The server of ``ingot serve`` and its port; ``app``: answers instead of the routes."""
    with listening(ServeConfig(port=0)) as own:
        found = own if listener is None else listener
        found.listen()
        server = _Server(ServerState({}, ServeConfig(), Metrics()), None, HOSTS)
        if app is not None:
            server.config.app = app
        if most is not None:
            server._connections.most = most
        task = asyncio.create_task(server.serve(sockets=[found]))
        address = found.getsockname()
        try:
            yield server, address[1] if isinstance(address, tuple) else 0
        finally:
            server.stop(at_once=True)
            await task


async def opened(port: int, data: bytes = b"", limit: int | None = None) -> Peer:
    connection = socket.socket()
    if limit is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(data)
    return reader, writer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.01)


async def answered(peer: Peer) -> bytes:
    """The status line and the rest of an answer of the routes."""
    async with asyncio.timeout(SOON):
        head = await peer[0].readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head + await peer[0].readexactly(length)


async def is_closed(peer: Peer) -> bool:
    """Wait until the server has closed a connection without a word."""
    async with asyncio.timeout(SOON):
        with contextlib.suppress(ConnectionError):
            return await peer[0].read(1) == b""
    return True


def inherited() -> socket.socket:
    """As a supervisor hands it over, without a protocol."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.bind(("127.0.0.1", 0))
    assert found.proto == 0
    return found


def of_ipv6() -> socket.socket:
    found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    found.bind(("::1", 0))
    return found


class TestSendingAtOnce:
    """Without TCP_NODELAY the last part of every answer waits for the client's acknowledgement, 40 ms."""

    @pytest.mark.parametrize("make", [None, inherited, of_ipv6], ids=["address", "inherited", "ipv6"])
    def test_every_accepted_connection_sends_at_once(self, make: Callable[[], socket.socket] | None) -> None:
        try:
            listener = None if make is None else make()
        except OSError:
            pytest.skip("no IPv6 here")

        async def test() -> None:
            async with serving(listener) as (server, port):
                host = "::1" if make is of_ipv6 else "127.0.0.1"
                reader, writer = await asyncio.open_connection(host, port)
                for _ in range(2):  # also on a warm one
                    writer.write(HEALTH)
                    assert (await answered((reader, writer))).startswith(b"HTTP/1.1 200 ")
                (connection,) = server._connections._open
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                writer.close()

        run(test)

    def test_a_socket_without_tcp_is_served(self, tmp_path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(tmp_path / "socket"))

        async def test() -> None:
            async with serving(listener):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
                writer.write(HEALTH)
                assert (await answered((reader, writer))).startswith(b"HTTP/1.1 200 ")
                writer.close()

        run(test)


class TestHalfOpen:
    @pytest.mark.parametrize("data", [b"", b"G", HALF], ids=["nothing", "a byte", "half the headers"])
    def test_headers_have_a_time(self, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        monkeypatch.setattr(rooms, "HEADER_SECONDS", 0.1)

        async def test() -> None:
            async with serving() as (server, port):
                assert await is_closed(await opened(port, data))
                assert len(server._connections) == 0

        run(test)

    def test_a_byte_at_a_time_gets_no_more_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also on a connection that was answered before, whose next request begins."""
        monkeypatch.setattr(rooms, "HEADER_SECONDS", 0.3)

        async def test() -> None:
            async with serving() as (_, port):
                peer = await opened(port, HEALTH)
                await answered(peer)
                await asyncio.sleep(0.4)  # it may be idle for longer
                start = asyncio.get_running_loop().time()
                closed = asyncio.create_task(is_closed(peer))
                while not closed.done():
                    peer[1].write(b"G")
                    await asyncio.sleep(0.02)
                assert 0.2 < asyncio.get_running_loop().time() - start < SOON / 2

        run(test)

    def test_an_idle_connection_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers, "_KEEP_ALIVE_SECONDS", 0.2)

        async def test() -> None:
            async with serving() as (_, port):
                peer = await opened(port, HEALTH)
                assert await answered(peer)
                assert await is_closed(peer)

        run(test)

    def test_an_answer_may_take_longer_than_headers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rooms, "HEADER_SECONDS", 0.1)

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0.4)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        async def test() -> None:
            async with serving(app=slow) as (_, port):
                assert (await answered(await opened(port, HEALTH))).endswith(b"ok")

        run(test)

    @pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
    def test_who_never_reads_the_answer_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch, close: bytes
    ) -> None:
        """Its bytes would be held for as long as the client likes."""
        monkeypatch.setattr(servers, "_KEEP_ALIVE_SECONDS", 0.2)
        monkeypatch.setattr(rooms, "UNREAD_SECONDS", 0.2)
        length = 8 << 20

        async def large(scope: Any, receive: Any, send: Any) -> None:
            size = b"%d" % length
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
            await send({"type": "http.response.body", "body": bytes(length)})

        async def test() -> None:
            async with serving(app=large) as (server, port):
                request = HEALTH[:-2] + close + b"\r\n"
                reader, writer = await opened(port, request, limit=4096)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await until(lambda: len(server._connections))
                await until(lambda: not len(server._connections))
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                received = 0
                with contextlib.suppress(ConnectionError):
                    while part := await reader.read(1 << 20):
                        received += len(part)
                assert received < length, "the whole answer was sent"
                writer.close()

        run(test)


class TestMost:
    def test_the_connection_that_waits_longest_is_closed(self) -> None:
        """Half-open connections keep no client out, and a client with a request loses nothing."""
        go_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                continue
            if scope["path"] == "/wait":
                await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        async def test() -> None:
            async with serving(app=app, most=3) as (server, port):
                count = server._connections
                busy = await opened(port, HEALTH.replace(b"/version", b"/wait"))
                await until(lambda: len(count) == 1 and not count._waiting)
                body = b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"
                halves = [await opened(port, data) for data in (body, HALF)]
                await until(lambda: len(count) == 3)
                late = await opened(port, HEALTH)
                assert (await answered(late)).endswith(b"ok")
                assert await is_closed(halves[0])
                assert len(count) == 3
                late[1].write(HEALTH)  # a kept connection that was used since
                await answered(late)
                later = await opened(port, HEALTH)
                assert (await answered(later)).endswith(b"ok")
                assert await is_closed(halves[1])
                go_on.set()
                assert (await answered(busy)).endswith(b"ok")

        run(test)

    def test_where_all_have_requests_the_next_is_refused(self) -> None:
        go_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        async def test() -> None:
            async with serving(app=app, most=2) as (server, port):
                busy = [await opened(port, HEALTH) for _ in range(2)]
                await until(lambda: len(server._connections) == 2 and not server._connections._waiting)
                refused = await answered(await opened(port))
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nRetry-After: 1\r\n" in refused
                assert b"too_many_connections" in refused
                go_on.set()
                for one in busy:
                    assert (await answered(one)).endswith(b"ok")
                assert (await answered(await opened(port, HEALTH))).endswith(b"ok")

        run(test)

    def test_no_descriptors(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """Accepting pauses instead of spinning, writes a line, closes who waits, and goes on."""
        monkeypatch.setattr(rooms, "_PAUSE_SECONDS", 0.05)
        tries: list[int] = []

        class Full:
            """A listening socket with no descriptors for a while."""

            def __init__(self, listener: socket.socket) -> None:
                self.real = listener
                self.fileno, self.setblocking = listener.fileno, listener.setblocking
                self.getsockname, self.close = listener.getsockname, listener.close
                self.listen = listener.listen

            def accept(self) -> Any:
                tries.append(1)
                if 1 < len(tries) <= 4:
                    raise OSError(errno.EMFILE, "Too many open files")
                return self.real.accept()

        async def test() -> None:
            with listening(ServeConfig(port=0)) as listener:
                async with serving(Full(listener)) as (server, port):  # type: ignore[arg-type]
                    half = await opened(port, HALF)
                    await until(lambda: len(tries) >= 2)
                    late = await opened(port, HEALTH)
                    assert (await answered(late)).startswith(b"HTTP/1.1 200 ")
                    assert await is_closed(half)
                    assert len(tries) < 12
                    assert len(server._connections) == 1

        run(test)
        lines = [record for record in caplog.records if "cannot be accepted" in record.getMessage()]
        assert len(lines) == 3

    def test_descriptors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The soft limit of files becomes the hard one, and connections leave some of them free."""
        limits: list[tuple[int, int]] = [(1024, 8192)]
        monkeypatch.setattr(rooms.resource, "getrlimit", lambda _: limits[-1])
        monkeypatch.setattr(rooms.resource, "setrlimit", lambda _, pair: limits.append(pair))
        assert raise_file_limit() == 4096
        assert limits == [(1024, 8192), (8192, 8192)]
        limits[:] = [(1024, 1024)]
        assert raise_file_limit() == 1024 - 320
        assert limits == [(1024, 1024)]
        limits[:] = [(256, -1)]
        assert raise_file_limit() == 4096
        assert limits[-1] == (65536, -1)
        limits[:] = [(64, 64)]
        assert raise_file_limit() == 32


def test_a_bound_of_connections_counts_those_that_end() -> None:
    """Hundreds come and go, in every state, and nothing is left of them."""

    async def test() -> None:
        async with serving(most=20) as (server, port):
            for data in (b"", HALF, HEALTH, b"\x16\x03\x01" * 20, HEALTH * 3):
                peers = [await opened(port, data) for _ in range(30)]
                await until(lambda: len(server._connections) > 0)
                for _, writer in peers:
                    writer.close()
            await until(lambda: len(server._connections) == 0)
            assert server._connections._waiting == {}

    run(test)


def test_accepting_stops() -> None:
    """Also while it pauses."""

    async def test() -> None:
        with listening(ServeConfig(port=0)) as listener:
            listener.listen()
            accepting = Accepting(listener, asyncio.Protocol, Connections(5))
            accepting.start()
            accepting._pause(OSError(errno.ENFILE, "full"))
            accepting.close()
            await accepting.wait_closed()
            await asyncio.sleep(0)
            assert accepting._retry is not None
            assert accepting._retry.cancelled()

    run(test)


class TestLog:
    def record(self, line: int, *args: object) -> logging.LogRecord:
        return logging.LogRecord("a", logging.WARNING, "file.py", line, "lost %s", args, None)

    def test_what_repeats_is_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("ingot.serve.http.log_limit.time.monotonic", lambda: now[0])
        limit = RepeatLimit(lines=2, seconds=60)
        assert [limit.filter(self.record(1, i)) for i in range(5)] == [True, True, False, False, False]
        assert limit.filter(self.record(2))  # another place
        now[0] = 60.0
        later = self.record(1, 9)
        assert limit.filter(later)
        assert later.getMessage() == "lost 9 (3 more like this were not logged)"
        assert [limit.filter(self.record(1, i)) for i in range(2)] == [True, False]

    def test_garbage_does_not_fill_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """uvicorn warns of every request that is no HTTP."""
        limit = RepeatLimit()
        caplog.handler.addFilter(limit)

        async def test() -> None:
            async with serving() as (_, port):
                for _ in range(40):
                    peer = await opened(port, b"\x16\x03\x01\x02\r\n\r\n")
                    assert (await answered_any(peer)).startswith(b"HTTP/1.1 400 ")

        try:
            run(test)
        finally:
            caplog.handler.removeFilter(limit)
        assert 1 <= len(caplog.records) <= 10


async def answered_any(peer: Peer) -> bytes:
    async with asyncio.timeout(SOON):
        return await peer[0].read()


def test_the_protocol_is_ours() -> None:
    """What uvicorn calls when a request or an answer ends is what we override."""
    for name in ("on_response_complete", "timeout_keep_alive_handler", "data_received", "connection_lost"):
        assert getattr(Connection, name) is not getattr(Connection.__mro__[1], name)
