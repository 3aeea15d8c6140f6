"""Python processes that tests start, forked where a fork will do: the libraries are imported once.

Owns the helper process that forks them, and what a fork changes so that it is as a fresh interpreter: files,
variables, signals, standard streams, ``sys.argv``. A fork has its requester for a parent, as what ``exec``
starts has: the requester adopts orphans, and the helper forks twice. Where the helper is not running, and for
any other program, ``subprocess`` does what it always does.

    [sys.executable, "-m", "ingot", ...]              # forked, and so is a server's engine
    [sys.executable, "-c", f"{MAY_FORK}\\n...", ...]  # forked: the test says that it need not be fresh
    [sys.executable, "benchmarks/memory.py", ...]     # forked, and so are processes of multiprocessing
    [sys.executable, "-I", "-S", "-c", ...]           # a ``LimitedProcess``: tests/forked_workers.py
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import logging
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.fork_loop import serve_forks
from tests.forked_workers import fork_worker, worker_of

MAY_FORK = "# may be forked"
_ENGINE = "ingot.serve.engine_calls.engine_process"
_SPAWNED = "multiprocessing.spawn"
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # of prctl
_REREAD = ("HF_", "INGOT_")  # variables that modules read when they are imported
_INTERPRETERS = ("LANG", "LC_", "MALLOC", "PYTHON", "TRITON_")  # what cannot be changed afterwards
_FRESH = ("huggingface_hub", "ingot", "sitecustomize", "tests")
_IMPORTED = (
    *("ingot.cli.main", "ingot.llm", "ingot.building.builder", "ingot.serve.server", _ENGINE),
    *("rich.console", "rich.progress", "rich.table"),
)
_prctl = ctypes.CDLL(None).prctl
_spawn = multiprocessing.util.spawnv_passfds
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_helper: socket.socket | None = None  # of this process
_lock = threading.Lock()


def start_helper() -> None:
    """From now on this process's Pythons are forked as it is now; best before it has any threads."""
    global _helper
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        try:
            _helper = None
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _prctl(_SET_NAME, b"helper", 0, 0, 0)
            _close_all_but({0, 1, 2, theirs.fileno()})
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _helper = ours
    subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_spawned


def take_terminal() -> None:
    """A ``preexec_fn``: the terminal that is a process's input is its own, whose Ctrl-C is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def can_fork(words: Sequence[Any], variables: Mapping[str, str]) -> bool:
    """Whether a command is one of those that this module forks, and no variable is the interpreter's."""
    if _helper is None or len(words) < 3 or words[0] != sys.executable:
        return False
    changed = {n for n in variables.keys() | os.environ.keys() if variables.get(n) != os.environ.get(n)}
    if any(name.startswith(_INTERPRETERS) and name != "PYTHONPATH" for name in changed):
        return False
    marked = words[1] == "-c" and (words[2].startswith(MAY_FORK) or _ENGINE in words[2])
    script = Path(words[1]).suffix == ".py" and Path(words[1]).parent.name == "benchmarks"
    return marked or script or list(words[1:3]) == ["-m", "ingot"]


def _fork_child(  # ``Popen._execute_child``, whose parameters these are
    self: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: Any,
    shell: bool,
    *given: Any,
) -> None:
    pipes, session = given[:6], given[11]
    variables = dict(os.environ if env is None else env)
    usual = isinstance(args, list) and close_fds and not (executable or shell)
    usual &= preexec_fn in (None, take_terminal)
    words = [os.fspath(word) for word in args] if usual else []
    worker = None if pass_fds or preexec_fn else worker_of(words, variables)
    if worker is None and not can_fork(words, variables):
        more = executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell
        _execute_child(self, args, *more, *given)
        return
    wanted = zip((pipes[0], pipes[3], pipes[5]), (0, 1, 2), strict=True)
    files = [own if file == -1 else file for file, own in wanted]
    folder = os.path.abspath(cwd or ".")
    request = {"words": words, "folder": folder, "variables": variables, "session": session}
    request["terminal"] = preexec_fn is take_terminal
    if worker is None:
        self.pid = _ask(request | {"kept": list(pass_fds)}, [*files, *pass_fds])
    else:
        self.pid = fork_worker(worker, request, files)
    self._child_created = True
    self._close_pipe_fds(*pipes)


def _fork_spawned(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """``multiprocessing.util.spawnv_passfds``; what keeps track of resources is started as ever."""
    words = [os.fsdecode(word) for word in args]
    program = next((place for place, word in enumerate(words) if _SPAWNED in word), None)
    if _helper is None or program is None:
        return _spawn(path, args, passfds)
    own = {"folder": os.getcwd(), "variables": dict(os.environ), "session": False, "terminal": False}
    command = [words[0], "-c", *words[program:]]
    return _ask(own | {"words": command, "kept": list(passfds)}, [0, 1, 2, *passfds])


def _ask(request: Mapping[str, Any], files: Sequence[int]) -> int:
    """The id of a process that is what is requested; the request is a file, for it may be long."""
    assert _helper is not None
    with open(os.memfd_create("request"), "wb") as stored:
        stored.write(json.dumps(request).encode())
        stored.flush()
        with _lock:
            socket.send_fds(_helper, [b"fork"], [stored.fileno(), *files])
            return int(_helper.recv(32))


def _serve(requests: socket.socket) -> None:
    """Fork what is asked for until the requester has ended; what most commands need is imported before."""
    serve_forks(requests, 64, _be_asked, _import_most)


def _import_most() -> None:
    if hasattr(importlib.import_module("typer.main").get_command, "cache_info"):  # by the requester's helper
        return
    for name in _IMPORTED:
        importlib.import_module(name)
    _make_verbs()
    gc.collect()
    gc.freeze()  # no collection of a fork walks through libraries, as in tests/conftest.py
    gc.unfreeze = lambda: None


def _be_asked(files: list[int]) -> NoReturn:
    with open(files[0], "rb") as stored:
        stored.seek(0)
        request = json.loads(stored.read())
    _be(request, files[1:])


def _make_verbs() -> None:
    """The parsers of all verbs are made once, not in every fork."""
    main = importlib.import_module("typer.main")
    main.get_command = functools.cache(main.get_command)  # type: ignore[attr-defined]
    main.get_command(importlib.import_module("ingot.cli.main").app)


def _be(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """This process becomes that of a command."""
    code = 70
    try:
        _take_files(files, [0, 1, 2, *request["kept"]])
        if request["session"]:
            os.setsid()
        if request["terminal"]:
            take_terminal()
        _be_fresh(request)
        start_helper()
        code = _run(request["words"])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Only these files stay open, under these numbers."""
    high = max([*files, *numbers]) + 1
    for place, file in enumerate(files):
        os.dup2(file, high + place)
    for place, number in enumerate(numbers):
        os.dup2(high + place, number, inheritable=True)
    _close_all_but(set(numbers))


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # that of the listing


def _be_fresh(request: dict[str, Any]) -> None:
    """What pytest has changed of the interpreter is as it was at the start."""
    for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(one) not in (signal.SIG_DFL, signal.SIG_IGN, None):  # exec keeps what is ignored
            signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.set_wakeup_fd(-1)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    for last in (logging.shutdown, weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(last)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings._showwarnmsg_impl = _show_warning  # type: ignore[attr-defined]
    before, after = dict(os.environ), request["variables"]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(after)
    path = [entry for entry in after.get("PYTHONPATH", "").split(os.pathsep) if entry]
    words = request["words"]
    first = {"-m": request["folder"], "-c": ""}.get(words[1], str(Path(words[1]).resolve().parent))
    sys.path[:0] = [first, *path]
    sys.orig_argv[:] = words
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    own = any((Path(entry) / "sitecustomize.py").exists() for entry in path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if own or any(name.startswith(_REREAD) for name in changed):
        for name in [name for name in sys.modules if name.split(".")[0] in _FRESH]:
            del sys.modules[name]
    if own:
        __import__("sitecustomize")


def _show_warning(message: warnings.WarningMessage) -> None:
    sys.stderr.write(warnings._formatwarnmsg(message))  # type: ignore[attr-defined]


def _stream(number: int, pytests: io.TextIOWrapper) -> io.TextIOWrapper:
    """As the interpreter opens its own; ``pytests``: what it opened in this process."""
    buffered = 0 if number and pytests.write_through else -1
    raw = open(number, "wb" if number else "rb", buffered, closefd=False)  # noqa: SIM115
    lines = os.isatty(number) or (number == 2 and pytests.line_buffering)
    return io.TextIOWrapper(raw, pytests.encoding, pytests.errors, None, lines, pytests.write_through)


def _run(words: list[str]) -> int:
    """The exit code of ``python -m ingot …`` or ``python -c …``; interpreters end the same way."""
    engine = words[1] == "-c" and _ENGINE in words[2]
    _prctl(_SET_NAME, b"engine_process" if engine else b"ingot", 0, 0, 0)
    try:
        if words[1] == "-m":
            sys.argv[:] = ["ingot", *words[3:]]
            runpy.run_module("ingot", run_name="__main__", alter_sys=True)
        elif words[1] != "-c":
            sys.argv[:] = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            sys.argv[:] = ["-c", *words[3:]]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(words[2], "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    return _ended(code)


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def _ended(code: int) -> int:
    """Wait for threads, call what is to be called at the end, and write what is still to be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    return code
