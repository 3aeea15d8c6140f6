"""A process that does what an untrusted file asks for, within limits of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from ingot.sandbox.limited_worker import OUT_OF_MEMORY, framed, message, read_message, value_of

_BOOT = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from ingot.sandbox.limited_worker import serve; "
    "serve(given['worker'], given['seconds'], given['memory'], given['nice'])"
)
_UNNEEDED = "is not needed any more"
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class ProcessLimits:
    """``seconds`` of CPU time for one answer; ``memory``: bytes of address space; ``nice``: added
    niceness.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    nice: int = 0


class ProcessEndedError(Exception):
    """The process ended before it answered; the text says why, as in "it " + text.

    Attributes:
        by_time: it used up its CPU time. Any other end may be the machine's fault.
    """

    def __init__(self, why: str, *, by_time: bool = False) -> None:
        super().__init__(why)
        self.by_time = by_time


class LimitedProcess:
    """Asks a module's ``answer`` in a process of its own. Safe to share between threads, which take turns.

    The process imports only that module. It starts with the first question and serves many; when it dies, the
    next question starts another. It ends with its owner.

    Args:
        worker: name of the module; its ``answer`` takes and returns JSON values, its ``answer_bytes`` takes
            bytes and returns parts of them.

        with LimitedProcess("ingot.text.chat.template_sandbox", ProcessLimits()) as process:
            process.ask({"source": "{{ 1 + 1 }}", "variables": {}})      # {"text": "2"}
    """

    def __init__(self, worker: str, limits: ProcessLimits) -> None:
        self._worker, self._limits = worker, limits
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._ended = False
        _all.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Any, cancelled: threading.Event | None = None) -> Any:
        """The answer to a question, a JSON value or its UTF-8 text as bytes.

        Args:
            cancelled: set it before ``interrupt`` to end the question at any point.

        Raises:
            ProcessEndedError: a limit was reached, the process crashed, or the question was cancelled.
            TypeError, ValueError, RecursionError: the question is not a JSON value.
        """
        data = framed(question) if isinstance(question, bytes) else message(question)
        return value_of(self._asked(data, cancelled))

    def ask_bytes(self, question: bytes) -> bytearray:
        """The answer of a worker that has ``answer_bytes``. Raises ``ProcessEndedError`` if a limit was
        reached, or the process crashed.
        """
        return self._asked(framed(question))

    def _asked(self, data: bytes, cancelled: threading.Event | None = None) -> bytearray:
        with self._lock:
            if self._ended:
                raise ProcessEndedError(_UNNEEDED)
            if self._running is None or self._running.owner != os.getpid():  # a fork has its own
                self._running = _Running.start(self, self._worker, self._limits)
            try:
                if self._ended or (cancelled is not None and cancelled.is_set()):  # while it was started
                    raise ProcessEndedError(_UNNEEDED)
                answer = self._running.exchange(data)
                if answer is None:
                    raise self._running.ended(self._limits)
            except BaseException:  # its next answer would be of this question
                self._stop()
                raise
        return answer

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def end(self) -> None:
        """End the process for good, without waiting: the current question fails, and so does any other."""
        self._ended = True
        self.interrupt()

    def interrupt(self) -> None:
        """End the process without waiting: the current question fails, and the next one starts another."""
        running = self._running
        if running is not None and running.owner == os.getpid():
            running.process.kill()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


_all: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _unlock() -> None:
    """In a fork: the thread that held a lock when the process forked is not there."""
    for one in list(_all):
        one._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    stderr_file: IO[bytes]
    owner: int
    end: weakref.finalize

    @classmethod
    def start(cls, of: LimitedProcess, worker: str, limits: ProcessLimits) -> Self:
        """Start the process in a session of its own, so that only its owner gets Ctrl-C."""
        path = [os.path.abspath(entry) for entry in sys.path] + [_ROOT]
        arguments = {"worker": worker, "path": path, **asdict(limits)}
        stderr_file = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        owner = os.getpid()
        return cls(process, stderr_file, owner, weakref.finalize(of, _end, process, stderr_file, owner))

    def exchange(self, data: bytes) -> bytearray | None:
        """Send a message and wait for the answer; None where the process ends instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return read_message(self.process.stdout)

    def ended(self, limits: ProcessLimits) -> ProcessEndedError:
        """The error that explains the end."""
        code = self.process.wait()
        self.stderr_file.seek(0)
        lines = self.stderr_file.read().decode("utf-8", "replace").strip().splitlines()
        if code == -signal.SIGPROF:
            return ProcessEndedError(f"needs more than {limits.seconds:g} seconds", by_time=True)
        if code == OUT_OF_MEMORY or any("memory allocation of" in line for line in lines):
            return ProcessEndedError(f"needs more than {limits.memory >> 20} MiB of memory")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ProcessEndedError(f"crashes ({how}{': ' + lines[-1][:200] if lines else ''})")


def _end(process: subprocess.Popen[bytes], stderr_file: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, stderr_file):
        if stream is not None:
            with suppress(BrokenPipeError):  # a question that never arrived
                stream.close()
