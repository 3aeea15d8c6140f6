"""Workers of ``LimitedProcess`` that tests start, forked from one that has their module (worker_helper.py).

A process that tests start begins its own workers as ever: a worker is a child of its requester. So does a
test that changes the paths of modules, or a variable that is read when a process starts.

    fork_workers()                              # from now on, in this process
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.sandbox.limited_process import _BOOT

_PROGRAM = Path(__file__).with_name("worker_helper.py")
_WORKERS = (
    "ingot.audio.audio_worker",
    "ingot.image.image_worker",
    "ingot.text.chat.template_sandbox",
    "ingot.text.grammar.grammar_probe",
    "ingot.text.prompt_worker",
    "ingot.text.tokenizer.tokenizer_probe",
)
_AT_START = ("INGOT_", "LANG", "LC_", "LD_", "MALLOC", "OMP_", "PYTHONHASH")  # variables
_lock = threading.Lock()
_owner: int | None = None  # the process whose workers are forked


@dataclass(frozen=True)
class WorkerHelper:
    """A running helper, and what it was started with."""

    requests: socket.socket
    process: subprocess.Popen[bytes]
    variables: dict[str, str]
    path: list[str]


_helpers: dict[str, WorkerHelper] = {}


def fork_workers() -> None:
    """From now on this process's workers are forked."""
    global _owner
    _owner = os.getpid()


def worker_of(words: Sequence[str], variables: Mapping[str, str]) -> WorkerHelper | None:
    """The helper that forks what a command starts; None for any other command."""
    if _owner != os.getpid() or list(words[:-1]) != [sys.executable, "-I", "-S", "-c", _BOOT]:
        return None
    given = json.loads(words[5])
    module = given.get("worker")
    if module not in _WORKERS:
        return None
    with _lock:
        if module not in _helpers:
            _helpers[module] = _started(module, given["path"])
    helper = _helpers[module]
    same = helper.path == given["path"] and helper.variables == _at_start(variables)
    return helper if same else None


def fork_worker(helper: WorkerHelper, request: Mapping[str, object], files: Sequence[int]) -> int:
    """The id of a process that is what is requested."""
    with open(os.memfd_create("request"), "wb") as stored:
        stored.write(json.dumps(request).encode())
        stored.flush()
        with _lock:
            socket.send_fds(helper.requests, [b"fork"], [stored.fileno(), *files])
            return int(helper.requests.recv(32))


def _started(module: str, path: list[str]) -> WorkerHelper:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-I", "-S", str(_PROGRAM), module, json.dumps(path)]
    with theirs:
        process = subprocess.Popen(words, stdin=theirs, start_new_session=True)
    return WorkerHelper(ours, process, _at_start(os.environ), path)


def _at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(_AT_START)}
