"""A process that speaks the engine's protocol and fails on request.

The file ``plan`` beside the engine's folder has one behaviour per start: ``serve``; ``die``,
``garbage``: at the first request; ``refuse``, ``exit``, ``hang``: instead of loading.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from ingot.serve.engine_calls.process_protocol import (
    Add,
    Failed,
    Gauges,
    LoadEngine,
    News,
    Ready,
    ScorePrompt,
    Splitter,
    StepNews,
    ToEngine,
    frame,
)

BOOT = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tests.serve.fake_engine import main; sys.exit(main(given['socket']))"
)
QUERIES = 10  # of the prefix cache, that each process counts with its first step


def main(descriptor: int) -> int:
    connection = socket.socket(fileno=descriptor)
    splitter: Splitter[ToEngine] = Splitter(ToEngine)
    how = "serve"
    while data := connection.recv(1 << 16):
        for message in splitter.feed(data):
            if isinstance(message, LoadEngine):
                how = _behaviour(Path(message.path).parent)
                if how == "refuse":
                    connection.sendall(frame(Failed("no room")))
                if how in ("refuse", "exit"):
                    return 3
                if how == "hang":
                    time.sleep(60)
                connection.sendall(frame(Ready(100, 4, 64)))
            elif isinstance(message, (Add, ScorePrompt)):
                _answer(connection, message, how)
    return 0


def _answer(connection: socket.socket, message: Add | ScorePrompt, how: str) -> None:
    """Handle a request as planned; a prompt of one token is never answered."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "garbage":
        connection.sendall(b"\xff\xff\xff\xff")
    elif isinstance(message, Add) and len(message.prompt_ids) > 1:
        news = [News(message.id, 0, (5,), "length")]
        connection.sendall(frame(StepNews(news, [], Gauges(prefix_queries=QUERIES))))


def _behaviour(folder: Path) -> str:
    """Of this start."""
    plan = (folder / "plan").read_text().split()
    number = len(list(folder.glob("start-*")))
    (folder / f"start-{number}-{os.getpid()}").touch()
    return plan[min(number, len(plan) - 1)]
