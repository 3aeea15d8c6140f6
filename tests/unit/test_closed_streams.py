"""A process whose stdin, stdout or stderr is closed, as daemons and cron jobs may be."""

from __future__ import annotations

import os
import sys

import pytest

from ingot.cli.main import app


def test_closed_streams_are_opened_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        app(["inspect", "no such engine"])
    assert ended.value.code == 2
    assert sys.stdin.read() == ""
    for stream in (sys.stdout, sys.stderr):
        print("goes nowhere", file=stream, flush=True)
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_a_stream_that_is_open_stays(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdin, sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        app(["inspect", "no such engine"])
    assert before == (sys.stdin, sys.stdout, sys.stderr)
    assert "no such engine" in capsys.readouterr().err
