"""A fork that stands in for a fresh Python is as one: what it is given, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import MAY_FORK, can_fork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes are not forked beside a GPU")


def python(code: str, *words: str, fork: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """What Python does with a program, in a fork or not."""
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, "-c", f"{MAY_FORK if fork else '#'}\n{code}", *words], **options)


STATE = """
import json, os, signal, sys, threading, warnings
json.dump({
    "argv": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "path": sys.path[:2],
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1], "input": sys.stdin.read(),
    "variables": {name: value for name, value in os.environ.items() if name.startswith("T_")},
    "signals": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals()
                if isinstance(number, signal.Signals) and not number.name.startswith("SIGRT")
                and number not in (signal.SIGXFSZ,)},
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])], "threads": threading.active_count(),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "name": __name__, "own_session": os.getsid(0) == os.getpid(),
}, sys.stdout)
"""


def state(path: Path, fork: bool) -> dict[str, Any]:
    more = {"PYTHONPATH": str(path), "T_A": "b"}
    words: Any = {"cwd": path, "env": os.environ | more, "input": "given", "start_new_session": True}
    done = python(STATE, "x", "y z", fork=fork, **words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["signals"] = {name: value.split(" at 0x")[0] for name, value in found["signals"].items()}
    return found


def test_it_is_given_what_a_fresh_one_is(tmp_path: Path) -> None:
    forked, fresh = state(tmp_path, fork=True), state(tmp_path, fork=False)
    assert forked["files"].pop(3) == 3  # the socket of its own helper
    assert forked == fresh


@pytest.mark.parametrize(
    "code",
    [
        "print('out'); import sys; print('err', file=sys.stderr)",
        "raise SystemExit(3)",
        "raise SystemExit('why')",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "import os; os._exit(9)",
        "import os; os.kill(os.getpid(), 15)",
        "import os, time; os.kill(os.getpid(), 2); time.sleep(9)",
        "import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'finalized')",
    ],
)
def test_it_ends_as_a_fresh_one_does(code: str) -> None:
    forked, fresh = python(code), python(code, fork=False)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_an_error_is_reported_and_is_a_one() -> None:
    done = python("raise KeyError(1)")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "KeyError: 1")


def test_a_reader_that_has_gone_and_a_signal() -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    code = f"{MAY_FORK}\nimport time; print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def test_variables_that_are_read_at_imports_are_read_again() -> None:
    code = "import huggingface_hub.constants as c, ingot.checkpoint.hub_repos; print(c.HF_HUB_CACHE)"
    assert python(code, env=os.environ | {"HF_HUB_CACHE": "/elsewhere"}).stdout == "/elsewhere\n"


def test_a_process_of_a_fork_is_a_fork_with_that_parent() -> None:
    inner = f"{MAY_FORK}\nimport os, sys; print(os.getppid(), 'torch' in sys.modules)"
    code = f"""import os, subprocess, sys
print(os.getpid(), True, flush=True)
subprocess.run([sys.executable, "-c", {inner!r}])"""
    first, second = python(code).stdout.splitlines()
    assert first == second


def test_others_are_not_forked() -> None:
    given = dict(os.environ)
    assert can_fork([sys.executable, "-m", "ingot", "run"], given)
    assert not can_fork([sys.executable, "-m", "ingot"], given | {"PYTHONHASHSEED": "1"})
    for words in (["-c", "import ingot"], ["-I", "-c", MAY_FORK], ["-m", "mypy"]):
        assert not can_fork([sys.executable, *words], given)
    assert not can_fork(["/bin/true", "-m", "ingot"], given)


def test_scripts_of_benchmarks_and_processes_of_multiprocessing_are_forked(tmp_path: Path) -> None:
    """The script begins with the modules of this process, and its process with those of the script's."""
    script = tmp_path / "benchmarks" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import multiprocessing, os, sys\n"
        "def inner(pipe): pipe.send((os.getppid(), 'tests.forked' in sys.modules)); sys.exit(3)\n"
        "if __name__ == '__main__':\n"
        "    ours, theirs = multiprocessing.Pipe()\n"
        "    child = multiprocessing.get_context('spawn').Process(target=inner, args=(theirs,))\n"
        "    child.start(); found = ours.recv(); child.join(); here = 'tests.forked' in sys.modules\n"
        "    print(found == (os.getpid(), True), child.exitcode, here, sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, str(script), "x"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True 3 True ['x']\n", "")
