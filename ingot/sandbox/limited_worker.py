"""The other side of ``LimitedProcess``: answers questions within limits that the kernel enforces.

Covers the limits, which the process sets for itself, and the loop.

    python -I -S -c BOOT '{"worker": "ingot.text.chat.template_sandbox", "seconds": 5, "bytes": 536870912}'
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, cast

Answer = Callable[[bytearray], Sequence[bytes | memoryview]]  # parts of one message
HEADER = 8  # bytes of a message's length
OUT_OF_MEMORY = 77  # exit code
_MOST_WRITTEN = 1 << 20  # bytes of a file, which is what the process says on stderr


def serve(worker: str, seconds: float, memory: int, nice: int = 0) -> None:
    """Answer what comes on stdin by the module's ``answer``, or ``answer_bytes``, until stdin ends.

    Args:
        seconds: of CPU time for one answer; the kernel ends a process that takes longer (SIGPROF).
        memory: bytes of address space.
        nice: added to the process's niceness.
    """
    os.nice(nice)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    try:
        module = importlib.import_module(worker)
        answer: Answer = getattr(module, "answer_bytes", None) or _as_json(module.answer)
        for limit, most in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
        ):
            _limit(limit, most)
        while (question := read_message(sys.stdin.buffer)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            parts = answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(sum(map(len, parts)).to_bytes(HEADER, "little"))
            for part in parts:
                out.write(part)
            out.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def message(value: Any) -> bytes:
    """A JSON value with its length before it."""
    return framed(_text(value))


def framed(data: bytes) -> bytes:
    """Bytes with their length before them."""
    return len(data).to_bytes(HEADER, "little") + data


def value_of(data: bytes | bytearray) -> Any:
    """The JSON value of a message."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def read_message(stream: IO[bytes]) -> bytearray | None:
    """The next message, in memory once; None where the other side is gone."""
    header = stream.read(HEADER)
    if len(header) < HEADER:
        return None
    data = bytearray(int.from_bytes(header, "little"))
    read = cast(io.BufferedIOBase, stream).readinto(data)
    return data if read == len(data) else None


def _as_json(answer: Callable[[Any], Any]) -> Answer:
    """Of JSON values."""
    return lambda data: [_text(answer(value_of(data)))]


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _limit(limit: int, most: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (most, most))
