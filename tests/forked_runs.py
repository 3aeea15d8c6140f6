"""Tests in several processes: forks of the one that collected them, so that they are collected once.

    pytest --forks 3        # without it tests run in pytest's own process, as ever

A fork takes all tests of a unit, such as a file, and then those of the next. Its reports go to the first
process, which runs no test itself. A fork that dies fails its test, and another takes its place.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

_PATIENCE = 30.0  # seconds for forks that are to end: their fixtures stop servers
_NEXT, _STARTED, _ENDED = "next", "started", "ended"  # messages of forks; others are hooks of pytest


@dataclass
class Fork:
    """A process of tests. Places are those in ``session.items``: of tests to be started, and of the last one
    that was.
    """

    pid: int
    connection: Connection
    places: deque[int] = field(default_factory=deque)
    last: int | None = None
    is_done: bool = False

    def __post_init__(self) -> None:
        self.end = os.pidfd_open(self.pid)


class ForkedRun:
    """The tests of a session, run by forks.

    ``unit_of`` names what one fork takes as a whole, by a test's id; units keep the order of their first
    tests. ``begin`` is called in each fork, before its first test.
    """

    def __init__(
        self, session: pytest.Session, unit_of: Callable[[str], str], begin: Callable[[], None]
    ) -> None:
        self._session, self._begin = session, begin
        units: dict[str, list[int]] = {}
        for place, item in enumerate(session.items):
            units.setdefault(unit_of(item.nodeid), []).append(place)
        self._units = deque(units.values())
        self._forks: list[Fork] = []
        self._made = 0

    def run(self, count: int) -> None:
        """Run every test in at most ``count`` forks; raises what pytest's own loop raises."""
        if reporter := self._session.config.pluginmanager.getplugin("terminalreporter"):
            reporter.showfspath = False  # files come in turn
        try:
            for _ in range(min(count, len(self._units))):
                self._fork()
            while self._forks:
                ready = wait([file for fork in self._forks for file in (fork.connection, fork.end)])
                for fork in [fork for fork in self._forks if {fork.connection, fork.end} & {*ready}]:
                    self._receive(fork)
        except KeyboardInterrupt:  # which a terminal sends to forks, too
            raise
        except BaseException:
            for fork in self._forks:
                os.kill(fork.pid, signal.SIGINT)
            raise
        finally:
            self._end()

    def _fork(self) -> None:
        config = self._session.config
        folders = config._tmp_path_factory  # type: ignore[attr-defined]
        folder = folders.getbasetemp() / f"fork{self._made}"
        folder.mkdir(mode=0o700)
        self._made += 1
        ours, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr, config.get_terminal_writer()):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *(other.connection for other in self._forks)):
                connection.close()
            folders._basetemp = folder
            _be_fork(self._session, theirs, self._begin)
        theirs.close()
        self._forks.append(Fork(pid, ours))

    def _receive(self, fork: Fork) -> None:
        try:
            messages = fork.connection.recv() if fork.connection.poll() else []
        except (EOFError, OSError):
            messages = []
        if not messages:
            self._remove(fork)
        for name, given in messages:
            if name == _NEXT:
                places = self._units.popleft() if self._units else []
                fork.places.extend(places)
                with suppress(OSError):  # its end is seen next
                    fork.connection.send(places)
            elif name == _STARTED:
                fork.last = fork.places.popleft()
            elif name == _ENDED:
                fork.is_done = True
            else:
                self._report(name, **given)

    def _report(self, name: str, **given: Any) -> None:
        """Call a hook of pytest as if the test ran in this process."""
        session, hooks = self._session, self._session.config.hook
        if name == "pytest_runtest_logreport":
            given["report"] = hooks.pytest_report_from_serializable(
                config=session.config, data=given["report"]
            )
        elif name == "pytest_warning_recorded":
            text, kind, *place = given["warning_message"]
            given["warning_message"] = warnings.WarningMessage(text, type(kind, (Warning,), {}), *place)
        hook = getattr(hooks, name)
        hook.call_historic(kwargs=given) if hook.is_historic() else hook(**given)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _remove(self, fork: Fork) -> None:
        """Of a fork that ended before its tests did: the last has failed, and another fork runs the rest."""
        self._forks.remove(fork)
        code = _wait_for(fork)
        if fork.is_done:
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if fork.last is None:
            raise self._session.Interrupted(f"a process of tests ended before its first test, {how}")
        if fork.places:
            self._units.appendleft([*fork.places])
        if self._units:
            self._fork()
        item = self._session.items[fork.last]
        text = f"The process of this test ended {how}."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._report("pytest_runtest_logreport", report=_serialized(item.config, report))

    def _end(self) -> None:
        """Wait for forks that are to end, and kill those that do not."""
        deadline = time.monotonic() + _PATIENCE
        for fork in self._forks:
            fork.connection.close()  # a fork that sends is told so
        for fork in self._forks:
            if not wait([fork.end], max(0.0, deadline - time.monotonic())):
                os.kill(fork.pid, signal.SIGKILL)
            _wait_for(fork)


def _wait_for(fork: Fork) -> int:
    """The exit code of a fork."""
    fork.connection.close()
    os.close(fork.end)
    return os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])


def _serialized(config: pytest.Config, report: pytest.TestReport) -> Any:
    return config.hook.pytest_report_to_serializable(config=config, report=report)


def _be_fork(session: pytest.Session, connection: Connection, begin: Callable[[], None]) -> NoReturn:
    """This process runs tests until there are none, or until the first process has ended."""
    code = 1
    try:
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # files of the first process
        _take_output(session.config)
        try:
            begin()
            reporter = _Reporter(session.config)
            session.config.pluginmanager.register(reporter)
            reporter.messages.clear()  # pytest repeats earlier warnings to what is registered
            _run_units(session, connection, reporter.messages)
        except (EOFError, ConnectionError, KeyboardInterrupt):
            session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _take_output(config: pytest.Config) -> None:
    """What tests print is captured in files of this process, and pytest prints nothing here."""
    plugins = config.pluginmanager
    if capture := plugins.getplugin("capturemanager"):
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()  # as it is between tests
    if plugins.unregister(name="terminalreporter"):
        # Timeouts write where the terminal's reporter would.
        plugins.register(
            SimpleNamespace(_tw=create_terminal_writer(config, sys.__stderr__)), "terminalreporter"
        )


def _run_units(session: pytest.Session, connection: Connection, messages: list[Any]) -> None:
    """The next unit is taken before the last test of one, which ends fixtures that the next test lacks. All
    messages of a test are sent at once.
    """

    def send(name: str) -> None:
        messages.append((name, None))
        connection.send(messages)
        messages.clear()

    def take() -> list[int]:
        send(_NEXT)
        taken: list[int] = connection.recv()
        return taken

    places = deque(take())
    while places:
        item = session.items[places.popleft()]
        if not places:
            places.extend(take())
        send(_STARTED)
        after = session.items[places[0]] if places else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    send(_ENDED)


class _Reporter:
    """Keeps what pytest reports in a fork as messages to the first process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.messages: list[tuple[str, Any]] = []

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._add("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._add("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add("pytest_runtest_logreport", report=_serialized(self._config, report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        one = warning_message
        # As text: a warning may hold anything, and its class may be a test's own.
        words = str(one.message), one.category.__name__, one.filename, one.lineno
        self._add(
            "pytest_warning_recorded", warning_message=words, when=when, nodeid=nodeid, location=location
        )

    def _add(self, name: str, **given: Any) -> None:
        self.messages.append((name, given))
