"""Garbage collections that hold nobody up.

A full collection of CPython looks at every object. PyTorch and an engine are 200,000 of them: 0.1 seconds
without a token, several times a minute under load.

    leave_out_what_is_loaded()     # when a process has loaded what it keeps
"""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Have later collections look at newer objects alone; called again, what is no longer used is freed."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
