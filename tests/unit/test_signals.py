"""Signals end a verb once, even if the exception is swallowed."""

from __future__ import annotations

import os
import signal

import pytest

from ingot.cli.terminal.signals import ends_once


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("mangled", [False, True])
def test_a_signal_ends_the_block(number: signal.Signals, ending: type[BaseException], mangled: bool) -> None:
    def interrupted() -> None:
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            if mangled:
                raise ValueError("what native code made of it") from None
            raise

    before = signal.getsignal(number)
    with pytest.raises(ending), ends_once():
        interrupted()
    assert signal.getsignal(number) == before


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="plain"), ends_once():
        raise ValueError("plain")
