"""The processes of a page and of its server.

Owns their start and end, and holds an engine still. Knows no browser.

    with page_of("http://127.0.0.1:8000") as url: ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.serve.client import ROOT, Server

POCKET = (ROOT / "models" / "pocket-chat", "--unproven", "--name", "pocket")


@contextlib.contextmanager
def page_of(url: str) -> Iterator[str]:
    """``ingot web`` for a server, while the block is open."""
    port = free_port()
    words = [sys.executable, "-m", "ingot", "web", "--url", url, "--web-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line == f"the page is on http://127.0.0.1:{port}\n", line + process.stderr.read()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
        assert process.wait(20) == 0


@contextlib.contextmanager
def held(server: Server) -> Iterator[None]:
    """The engine makes no step while the block is open."""
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
