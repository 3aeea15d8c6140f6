"""Where the program begins: a Ctrl-C while the terminal's modules load ends it without a traceback."""

from __future__ import annotations

import os
import signal

from ingot.cli.terminal.held_signals import hold_signals_during

_INTERRUPTED = 130


def start() -> None:
    """Run ``ingot`` with the process's arguments."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else a parent has it ignored
        signal.signal(signal.SIGINT, _end)
    from typer.main import get_command

    from ingot.cli.main import app

    verbs = get_command(app)
    hold_signals_during("torch")
    signal.signal(signal.SIGINT, usual)
    verbs(prog_name="ingot")


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)
