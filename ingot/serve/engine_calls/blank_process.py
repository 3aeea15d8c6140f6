"""An engine's process that has no engine yet: it imports what it needs while the server imports its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_BOOT = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from ingot.serve.engine_calls.early_context import begin_context; begin_context(given['device']); "
    "from ingot.serve.engine_calls.engine_process import main; sys.exit(main(given['socket']))"
)
_ROOT = str(Path(__file__).parents[3])


def shared_memory() -> int:
    """The descriptor of a file without a name, which is a process's own until another inherits it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ingot-windows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BlankProcess:
    """A started process that waits for ``LoadEngine`` over a socket, and ends when that is closed.

    Args:
        windows: the descriptor of memory for features, which it inherits; None: it has none.
        device: what ``LoadEngine`` will say.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, windows: int | None = None, device: str | None = None) -> None:
        self.windows = windows
        self._ours, theirs = socket.socketpair()
        with theirs:
            path = [os.path.abspath(entry) for entry in sys.path] + [_ROOT]
            settings = json.dumps({"socket": theirs.fileno(), "path": path, "device": device})
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, settings],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what libraries print is not data
                    pass_fds=[theirs.fileno(), *([] if windows is None else [windows])],
                    start_new_session=True,  # Ctrl-C is the server's, which ends its engines
                )
            except OSError:
                self._ours.close()
                raise
        self._taken = False

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and the server's end of the socket, which are the caller's from now on."""
        assert not self._taken, "a process has one engine"
        self._taken = True
        return self._process, self._ours

    def close(self) -> None:
        """End the process, unless it was taken."""
        if self._taken:
            return
        self._process.kill()
        self._process.wait()
        self._ours.close()
