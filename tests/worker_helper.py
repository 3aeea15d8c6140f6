"""Forks workers of ``LimitedProcess`` (tests/forked_workers.py): their module is imported once. A program as
lean as they are, for what a process has from its start counts towards their limit of memory.

    python -I -S tests/worker_helper.py MODULE PATHS        # requests come by the socket that is its input
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy  # noqa: F401  (what an interpreter with -c has, too)
import signal
import socket
import sys
import traceback

sys.path.insert(0, os.path.dirname(__file__))  # which -I leaves out
from fork_loop import serve_forks


def main(module: str, paths: str) -> None:
    """Fork what is asked for until the requester has ended."""
    sys.path[:] = json.loads(paths)
    importlib.import_module("ingot.sandbox.limited_worker")
    importlib.import_module(module)
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=os.dup(0)), 8, _be_worker)


def _be_worker(files: list[int]) -> None:
    """This process becomes the worker of a request: its text, and files for input, output and errors."""
    code = 1
    try:
        with open(files[0], "rb") as stored:
            stored.seek(0)
            request = json.loads(stored.read())
        for number, file in enumerate(files[1:]):
            os.dup2(file, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
                os.close(int(name))
        os.setsid()
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        sys.argv[:] = ["-c", *request["words"][5:]]
        exec(request["words"][4], {"__name__": "__main__"})
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
