"""An engine whose process dies is restarted or given up; a fake process stands in for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot import SamplingParams
from ingot.config.allowed_hosts import HostRule
from ingot.config.server_config import ServeConfig
from ingot.errors import EngineError
from ingot.serve.api_errors import ApiError
from ingot.serve.app import ServerState
from ingot.serve.engine_calls import blank_process, engine_run
from ingot.serve.engine_calls.answering import Job
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.process_link import Link
from ingot.serve.engine_calls.process_protocol import Abort, LoadEngine, frame
from ingot.serve.engine_calls.restarts import RestartPolicy, folder_stamp
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.server import _Server
from tests.serve.client import is_gone
from tests.serve.fake_engine import BOOT, QUERIES

QUICK = RestartPolicy(first_seconds=0.01, most_seconds=0.02, most_failures=3)
PARAMS = SamplingParams(max_new_tokens=1)
HOSTS = HostRule.of("127.0.0.1")
SOON = 20.0  # seconds; only a failing test waits this long


class Case:
    """A folder with a plan, and the processes that were started for it."""

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder = folder
        (folder / "plan").write_text(plan)
        self.engine_folder = folder / "engine"
        self.engine_folder.mkdir()
        (self.engine_folder / "manifest.json").write_text("{}")
        self.metrics = Metrics()

    @property
    def pids(self) -> list[int]:
        """In the order of their starts."""
        names = [path.name.split("-") for path in self.folder.glob("start-*")]
        return [int(pid) for _, _, pid in sorted(names, key=lambda name: int(name[1]))]

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model_name": "fake"}) or 0.0

    @contextlib.asynccontextmanager
    async def engine(self, policy: RestartPolicy | None = QUICK) -> AsyncIterator[EngineClient]:
        load, of = LoadEngine(str(self.engine_folder)), self.metrics.of("fake")
        found = await EngineClient.start("fake", load, ServeConfig(), of, restarts=policy)
        try:
            yield found
        finally:
            await found.close()
            assert all(map(is_reaped, self.pids))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Case]:
    monkeypatch.setattr(blank_process, "_BOOT", BOOT)
    return lambda plan: Case(tmp_path, plan)


def is_reaped(pid: int) -> bool:
    """Gone, and no zombie of ours."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return True
    return int(parent) != os.getpid()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * SOON):
            await test()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.01)


async def asked(engine: EngineClient, ids: list[int] | None = None, **job: Any) -> int | str | None:
    """The status of a request's error, or why it ended."""
    try:
        with (
            engine.places(1),
            engine.answering([Job(ids or [1, 2], PARAMS, **job)], None, by_piece=False) as it,
        ):
            await it.finish()
            return it.answers(0)[0].finish_reason
    except ApiError as error:
        return error.status if error.code == "engine_dead" else error.code


async def refusal(engine: EngineClient) -> ApiError:
    with pytest.raises(ApiError) as caught, engine.places(1):
        pass
    return caught.value


def test_a_dead_engine_restarts(case: Callable[[str], Case], caplog: pytest.LogCaptureFixture) -> None:
    """Its requests end with an error at once, the next get Retry-After, and then it serves. The
    log names the signal, and no zombie is left.
    """
    made = case("die serve")
    caplog.set_level(logging.INFO)

    async def test() -> None:
        async with made.engine(RestartPolicy(first_seconds=0.3)) as engine:
            (first,) = made.pids
            waiting = asyncio.ensure_future(asked(engine, [1], score=2))
            assert await asked(engine) == 500
            assert await waiting == 500
            error = await refusal(engine)
            assert (error.status, error.code) == (503, "engine_dead")
            await until(lambda: "SIGKILL" in (engine.lost or ""))
            assert is_reaped(first)
            await until(lambda: engine.lost is None)
            assert not engine.given_up
            assert await asked(engine) == "length"
            assert len(made.pids) == 2
            assert made.metric("ingot_engine_restarts_total") == 1
            assert engine._taken == 0
            assert engine._owners == {}

    run(test)
    reported = "\n".join(record.getMessage() for record in caplog.records)
    assert "fake: the engine's process was ended by SIGKILL" in reported
    assert "fake: starting the engine again in 0.3 s" in reported
    assert "fake: the engine takes requests again" in reported


def test_retry_after_is_honest(case: Callable[[str], Case]) -> None:
    """The wait that is left and the time that loading took."""
    made = case("die serve")

    async def test() -> None:
        async with made.engine(RestartPolicy(first_seconds=30)) as engine:
            engine._load_seconds = 11.5
            assert await asked(engine) == 500
            assert (await refusal(engine)).headers["Retry-After"] == "12"
            await until(lambda: engine._back_at and engine._back_at - time.monotonic() > 30)
            assert (await refusal(engine)).headers["Retry-After"] in ("41", "42")

    run(test)


@pytest.mark.parametrize(
    ("left", "given_up", "expected"),
    [(41.5, False, "42"), (0.2, False, "1"), (-30.0, False, "1"), (None, False, "1"), (None, True, None)],
)
async def test_retry_after_is_in_the_future_or_absent(
    left: float | None, given_up: bool, expected: str | None
) -> None:
    """A process may take longer to load than the last one did; an engine without one is not expected back."""
    engine = EngineClient("fake", LoadEngine("/e"), ServeConfig(), Metrics().of("fake"))
    engine.lost, engine.given_up = "gone", given_up
    engine._back_at = None if left is None else time.monotonic() + left
    with pytest.raises(ApiError) as at_answering, engine.answering([], None, by_piece=False):
        pass
    for error in (await refusal(engine), at_answering.value):
        assert (error.status, error.code, error.message) == (503, "engine_dead", "fake: gone")
        assert error.headers.get("Retry-After") == expected


def test_counters_of_a_new_process_begin_at_zero(case: Callable[[str], Case]) -> None:
    made = case("serve")

    async def test() -> None:
        async with made.engine() as engine:
            for count in (1, 2):
                assert await asked(engine) == "length"
                assert made.metric("ingot_prefix_cache_queries_total") == count * QUERIES
                os.kill(made.pids[-1], signal.SIGSEGV)
                await until(lambda: "SIGSEGV" in (engine.lost or ""))
                assert engine.gauges.prefix_queries == 0
                await until(lambda: engine.lost is None)

    run(test)


@pytest.mark.parametrize("plan", ["die refuse", "die exit", "die"])
def test_a_crash_loop_ends(case: Callable[[str], Case], plan: str) -> None:
    """After three failures in a row; no Retry-After, and listeners are notified."""
    made, calls = case(plan), []

    async def test() -> None:
        async with made.engine() as engine:
            engine.on_given_up = lambda: calls.append(1)
            while not engine.given_up:
                await asked(engine)
                await asyncio.sleep(0.01)
            error = await refusal(engine)
            assert "given up after 3 failures in a row" in error.message
            assert error.headers == {}
            assert len(made.pids) == 3
            assert made.metric("ingot_engine_restarts_total") == 2

    run(test)
    assert calls == [1]


def test_failures_are_counted_in_a_row(case: Callable[[str], Case]) -> None:
    """An engine that had run for long enough has a clean record."""
    made = case("die")

    async def test() -> None:
        async with made.engine(
            RestartPolicy(first_seconds=0.01, most_failures=2, stable_seconds=0)
        ) as engine:
            for count in range(1, 4):
                assert await asked(engine) == 500
                await until(lambda count=count: len(made.pids) == count + 1 and engine.lost is None)

    run(test)


def test_an_engine_that_sends_garbage_is_killed(case: Callable[[str], Case]) -> None:
    made = case("garbage serve")

    async def test() -> None:
        async with made.engine() as engine:
            (first,) = made.pids
            assert await asked(engine) == 500
            await until(lambda: is_gone(first))
            await until(lambda: engine.lost is None)
            assert await asked(engine) == "length"

    run(test)


def test_another_engine_in_its_folder_is_not_loaded(case: Callable[[str], Case]) -> None:
    """The server has the tokenizer of the first one."""
    made = case("die serve")

    async def test() -> None:
        async with made.engine() as engine:
            (made.engine_folder / "manifest.json").write_text('{"other": 1}')
            assert await asked(engine) == 500
            await until(lambda: engine.given_up)
            assert "folder has changed" in (await refusal(engine)).message
            assert len(made.pids) == 1

    run(test)


def test_a_checkpoint_that_has_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = folder_stamp(tmp_path)
    assert folder_stamp(tmp_path) == before
    (tmp_path / "config.json").write_text("{ }")
    assert folder_stamp(tmp_path) != before


@pytest.mark.parametrize("plan", ["die serve", "die hang"])
def test_the_server_stops_meanwhile(
    case: Callable[[str], Case], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for its next start, and while it loads, which ends by a signal at once."""
    monkeypatch.setattr(engine_run, "_END_SECONDS", 2 * SOON)
    made = case(plan)
    wait = 0.01 if "hang" in plan else 60.0

    async def test() -> None:
        async with made.engine(RestartPolicy(first_seconds=wait)) as engine:
            assert await asked(engine) == 500
            await until(lambda: len(made.pids) == 2 if "hang" in plan else "SIGKILL" in (engine.lost or ""))

    start = time.monotonic()
    run(test)
    assert time.monotonic() - start < SOON


def test_without_a_policy_it_stays_dead(case: Callable[[str], Case]) -> None:
    made = case("die serve")

    async def test() -> None:
        async with made.engine(None) as engine:
            (first,) = made.pids
            assert await asked(engine) == 500
            await until(lambda: is_reaped(first))
            assert (await refusal(engine)).headers["Retry-After"]
            assert not engine.given_up

    run(test)


@pytest.mark.parametrize("plan", ["refuse", "exit"])
def test_a_first_start_that_fails_is_an_error(case: Callable[[str], Case], plan: str) -> None:
    made = case(plan)

    async def test() -> None:
        with pytest.raises(EngineError, match=r"no room|has ended"):
            async with made.engine():
                pass
        assert len(made.pids) == 1
        assert all(map(is_reaped, made.pids))

    run(test)


def test_waits_double() -> None:
    policy = RestartPolicy(first_seconds=1, most_seconds=5, most_failures=5)
    assert [policy.delay(count) for count in range(1, 6)] == [1, 2, 4, 5, None]


def test_a_server_without_engines_ends() -> None:
    """Not while another one lives."""
    first, second = (
        SimpleNamespace(given_up=False, lost=None, on_given_up=None, most_answers=1) for _ in "ab"
    )
    models: Any = {"a": SimpleNamespace(engine=first), "b": SimpleNamespace(engine=second)}
    server = _Server(ServerState(models, ServeConfig(), Metrics()), None, HOSTS)
    first.given_up, first.lost = True, "the engine's process was ended by SIGKILL"
    first.on_given_up()  # type: ignore[misc]
    assert not server.should_exit
    server.check_engines()
    second.given_up, second.lost = True, "no room"
    second.on_given_up()  # type: ignore[misc]
    assert server.should_exit
    with pytest.raises(EngineError, match=r"every engine has died.*SIGKILL.*b: no room"):
        server.check_engines()


def test_descriptors_beyond_1024() -> None:
    """A server with many connections starts an engine again, whose socket then has such a number."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("no such descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=os.dup2(theirs.fileno(), 1150))
    try:
        ours.sendall(frame(Abort("7")))
        assert Link(high).exchange(wait=True) == [Abort("7")]
    finally:
        for one in (ours, theirs, high):
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
