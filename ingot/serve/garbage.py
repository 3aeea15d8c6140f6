"""Garbage collections that hold nobody up.

A full collection of CPython looks at every object. PyTorch and an engine are 200,000 of them: 0.1 seconds
without a token, several times a minute under load.

    leave_out_what_is_loaded()     # once, when a process has loaded all that it keeps
"""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Have later collections look at newer objects alone."""
    gc.collect()
    gc.freeze()
