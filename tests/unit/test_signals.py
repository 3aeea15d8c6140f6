"""Signals end a verb once, even if the exception is swallowed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli.start import start
from ingot.cli.terminal.held_signals import hold_signals_during
from ingot.cli.terminal.signals import ends_once

ENDINGS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]


def interrupted(number: signal.Signals, native: str) -> None:
    """A signal whose exception native code passes on, replaces or drops."""
    try:
        os.kill(os.getpid(), number)
    except BaseException:
        if native == "replaces":
            raise ValueError("what native code made of it") from None
        if native == "passes on":
            raise


@pytest.mark.parametrize(("number", "ending"), ENDINGS)
@pytest.mark.parametrize("native", ["passes on", "replaces", "drops"])
def test_a_signal_ends_the_block(number: signal.Signals, ending: type[BaseException], native: str) -> None:
    before = signal.getsignal(number)
    with pytest.raises(ending), ends_once():
        interrupted(number, native)
    assert signal.getsignal(number) == before


def test_a_second_signal_interrupts_where_the_first_was_dropped() -> None:
    done = []

    def work() -> None:
        interrupted(signal.SIGINT, "drops")
        done.append("went on")
        interrupted(signal.SIGINT, "passes on")
        done.append("the second was ignored")

    with pytest.raises(KeyboardInterrupt), ends_once():
        work()
    assert done == ["went on"]


@pytest.mark.parametrize("native", ["passes on", "replaces"])
def test_a_second_signal_lets_clean_up_finish(native: str) -> None:
    done = []

    def work() -> None:
        try:
            interrupted(signal.SIGINT, native)
        finally:
            interrupted(signal.SIGINT, "passes on")
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), ends_once():
        work()
    assert done == ["cleaned up"]


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[signal.Signals], None]:
    """Write a module ``native``, which gets a signal while it is imported, and hold signals during that."""

    def write(number: signal.Signals) -> None:
        text = f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\n    whole = True\n"
        (tmp_path / "native.py").write_text(text + "except BaseException:\n    whole = False\n")
        hold_signals_during("native")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "native", raising=False)
    return write


@pytest.mark.parametrize(("number", "ending"), ENDINGS)
def test_a_signal_during_an_import_arrives_after_it(
    number: signal.Signals, ending: type[BaseException], native: Callable[[signal.Signals], None]
) -> None:
    native(number)

    def work() -> None:
        importlib.import_module("native")
        for _ in range(1000):  # a signal just before one sleep arrives after it
            time.sleep(0.01)
        raise AssertionError("the signal was lost")

    with pytest.raises(ending), ends_once():
        work()
    assert sys.modules.pop("native").whole


def test_a_signal_that_is_ignored_stays_ignored_during_an_import(
    native: Callable[[signal.Signals], None],
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    native(signal.SIGINT)
    try:
        importlib.import_module("native")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        time.sleep(0.05)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.modules.pop("native").whole


def test_the_terminal_holds_signals_while_pytorch_is_imported(tmp_path: Path) -> None:
    """Of every verb: here of a new process, whose PyTorch is a module that gets Ctrl-C."""
    code = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / "torch.py").write_text(code)
    program = (
        "import sys, time\n"
        "import typer.main\n"
        "def verbs(**_):\n"
        "    import torch\n"
        "    for _ in range(1000): time.sleep(0.01)\n"
        "typer.main.get_command = lambda app: verbs\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ingot.cli.start import start\n"
        "try: start()\n"
        "except KeyboardInterrupt: print('arrived')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "arrived\n"), done.stderr


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="plain"), ends_once():
        raise ValueError("plain")


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_modules_load(ignored: bool) -> None:
    """It ends the program without a traceback, unless a parent has it ignored."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'ingot.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'})\n"
        "sys.argv = ['ingot', '--version']\n"
        "from ingot.cli.start import start; start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if ignored:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_ctrl_c_is_pythons_own_once_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a verb cleans up; the early one would end the process at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[object] = []

    def verbs(**_: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr("typer.main.get_command", lambda app: verbs)
    try:
        start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler]
