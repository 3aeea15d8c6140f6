"""A side of a race in a process of its own: its memory and threads are then its own, too.

figures = json.loads(last_line("ingot", [sys.executable, __file__, "--one", "w8a8"]))
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence


def last_line(side: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The last line that a command prints, empty if it prints none; a command that fails ends this program.

    Args:
        environment: what the command has beside this process's variables, or in their place.
    """
    own = {**os.environ, **(environment or {})}
    done = subprocess.run(words, capture_output=True, text=True, env=own, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]
