"""The worker's side of ``LimitedProcess``: sets the limits and answers questions."""

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

from ingot.errors import IngotError, RequestError, shown

Answer = Callable[[bytearray], Sequence[bytes | memoryview]]  # parts of one message
HEADER = 8  # bytes of a message's length
OUT_OF_MEMORY = 77  # exit code
_MOST_WRITTEN = 1 << 20  # bytes of a file: the process's stderr
_FAILED = b"fail"  # begins an answer in bytes that is an error


def serve(worker: str, seconds: float, memory: int, nice: int = 0) -> None:
    """Answer questions on stdin with the module's ``answer`` or ``answer_bytes``, until stdin ends.

    Args:
        seconds: CPU time of one answer; the kernel ends a process that takes longer (SIGPROF).
        memory: bytes of address space.
        nice: added to the process's niceness.
    """
    os.nice(nice)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    try:
        module = importlib.import_module(worker)
        answer: Answer | None = getattr(module, "answer_bytes", None)
        limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: _MOST_WRITTEN}
        for limit, most in limits.items():  # lower them for good; one that is lower already stays
            hard = resource.getrlimit(limit)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))
        while (question := read_message(sys.stdin.buffer)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            parts = answer(question) if answer else [_text(module.answer(value_of(question)))]
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(sum(map(len, parts)).to_bytes(HEADER, "little"))
            for part in parts:
                out.write(part)
            out.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def message(value: Any) -> bytes:
    """A JSON value, preceded by its length."""
    return framed(_text(value))


def framed(data: bytes) -> bytes:
    """Bytes, preceded by their length."""
    return len(data).to_bytes(HEADER, "little") + data


def error_parts(error: IngotError) -> dict[str, str | None]:
    """An error's arguments as JSON values, with which the other side raises it again."""
    seen, allowed = (None if value is None else shown(value) for value in (error.seen, error.allowed))
    return {"what": error.what, "seen": seen, "allowed": allowed, "fix": error.fix}


def failure(error: IngotError) -> list[bytes | memoryview]:
    """An error as an answer in bytes."""
    return [_FAILED, json.dumps(error_parts(error)).encode()]


def raise_failure(answer: bytearray) -> None:
    """Raise the ``RequestError`` of an answer in bytes, if it is one."""
    if answer[: len(_FAILED)] == _FAILED:
        parts = json.loads(answer[len(_FAILED) :])
        raise RequestError(parts.pop("what"), **parts)


def value_of(data: bytes | bytearray) -> Any:
    """The JSON value of a message."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def read_message(stream: IO[bytes]) -> bytearray | None:
    """The next message, without a copy; None where the other side is gone."""
    header = stream.read(HEADER)
    if len(header) < HEADER:
        return None
    data = bytearray(int.from_bytes(header, "little"))
    read = cast(io.BufferedIOBase, stream).readinto(data)
    return data if read == len(data) else None


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
