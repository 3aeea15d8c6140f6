"""A worker of ``LimitedProcess`` that answers with what it was given, and fails where it is asked to."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

SLOW = {"difflib", "importlib.metadata", "ingot.config.sampling_params", "numpy", "torch"}  # to import


def answer(question: str) -> dict[str, Any]:
    if question == "exit":
        os._exit(9)
    if question == "raise":
        raise OSError("as asked")
    if question == "hang":
        while True:
            pass
    if question == "fill":
        return {"filled": len(bytearray(1 << 40))}
    files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    return {
        "argv": sys.argv[:1],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "files": files,
        "flags": [sys.flags.isolated, sys.flags.no_site],
        "folder": os.getcwd(),
        "input": os.readlink("/proc/self/fd/0").split(":")[0],
        "interrupt": str(signal.getsignal(signal.SIGINT)).split(" at 0x")[0],
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)],
        "nice": os.nice(0),
        "own_session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "path": sys.path,
        "slow": sorted(SLOW & sys.modules.keys()),
        "variables": dict(os.environ),
    }
