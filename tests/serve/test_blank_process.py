"""An engine's process that is started before its engine is known, so that both import at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ingot.cli import serve as command
from ingot.cli.main import app
from ingot.config.server_config import ServeConfig
from ingot.errors import EngineError
from ingot.serve.engine_calls import blank_process
from ingot.serve.engine_calls.blank_process import BlankProcess, shared_memory
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.process_protocol import LoadEngine
from tests.serve.client import is_gone
from tests.serve.fake_engine import BOOT
from tests.serve.test_restarts import QUICK, Case, asked, run, until

_WAITS = (
    "import json, socket, sys; found = socket.socket(fileno=json.loads(sys.argv[1])['socket']); "
    "found.send(b'!'); found.recv(1)"
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blank_process, "_BOOT", _WAITS)


@pytest.mark.usefixtures("waits")
def test_one_that_gets_no_engine_is_ended() -> None:
    blank = BlankProcess()
    assert blank._ours.recv(1) == b"!"
    blank.close()
    assert blank._process.returncode == -signal.SIGKILL
    blank.close()


@pytest.mark.usefixtures("waits")
def test_one_that_was_taken_is_left_alone() -> None:
    blank = BlankProcess()
    process, ours = blank.take()
    blank.close()
    assert process.poll() is None
    assert ours.recv(1) == b"!"
    ours.close()
    assert process.wait(10) == 0, "it ends with the socket"
    with pytest.raises(AssertionError):
        blank.take()


def test_its_context_is_of_the_engine_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it begins before it imports the loop."""
    boot = blank_process._BOOT
    assert boot.index("begin_context(given['device'])") < boot.index("engine_process")
    says = "socket.socket(fileno=given['socket']).send(given['device'].encode())"
    code = f"import json, socket, sys; given = json.loads(sys.argv[1]); {says}"
    monkeypatch.setattr(blank_process, "_BOOT", code)
    blank = BlankProcess(device="cuda:1")
    assert blank._ours.recv(9) == b"cuda:1"
    blank.close()


def test_it_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Before that has anything to load, and with no chance to say so."""
    code = f"""
import os, signal
from ingot.serve.engine_calls import blank_process
blank_process._BOOT = {_WAITS!r}
blank = blank_process.BlankProcess()
blank._ours.recv(1)
print(blank._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    until_gone = time.monotonic() + 10
    while not is_gone(int(done.stdout)):
        assert time.monotonic() < until_gone
        time.sleep(0.02)


def test_an_engine_is_loaded_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory that it has; the process of a restart is another."""
    monkeypatch.setattr(blank_process, "_BOOT", BOOT)
    made = Case(tmp_path, "die serve")

    async def test() -> None:
        memory = shared_memory()
        blank = BlankProcess(memory)
        load, of = LoadEngine(str(made.engine_folder)), made.metrics.of("fake")
        engine = await EngineClient.start("fake", load, ServeConfig(), of, (2, 3), QUICK, blank)
        try:
            assert made.pids == [blank._process.pid]
            assert engine.windows is not None
            assert engine.windows.handle == (memory, (2, 3))
            assert await asked(engine) == 500
            await until(lambda: engine.lost is None)
            assert made.pids[0] == blank._process.pid != made.pids[1]
            assert await asked(engine) == "length"
        finally:
            await engine.close()

    run(test)


@pytest.mark.usefixtures("waits")
def test_the_command_starts_one_for_each_engine_and_ends_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before it reads the engines, which may fail."""
    seen: list[Any] = []
    usual = command._started

    def started(devices: list[str | None], beside: contextlib.ExitStack) -> list[BlankProcess]:
        assert devices == ["cpu", "cuda:1"]
        seen.extend(usual(devices, beside))
        return seen

    def fails(models: list[Any]) -> None:
        assert [one._ours.recv(1) for one in seen] == [b"!", b"!"]
        assert len({one.windows for one in seen}) == 2
        raise EngineError("it cannot be read")

    monkeypatch.setattr(command, "_started", started)
    monkeypatch.setattr(command, "_text_sides", fails)
    engines = [tmp_path / "a", tmp_path / "b"]
    for engine in engines:
        engine.mkdir()
    words = ["serve", *map(str, engines), "--device", "cpu", "--device", "cuda:1"]
    get_command(app)(words, standalone_mode=False)
    assert "it cannot be read" in capsys.readouterr().err
    assert [one._process.returncode for one in seen] == [-signal.SIGKILL] * 2


def test_it_is_started_without_pytorch() -> None:
    """Else it would wait for what it is to import meanwhile."""
    code = (
        "import sys, ingot.serve.engine_calls.blank_process as b, ingot.serve.engine_calls.process_protocol"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_shared_memory_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    found = shared_memory()
    assert os.pwrite(found, b"abc", 5) == 3
    assert os.fstat(found).st_nlink == 0
    os.close(found)
