"""Short garbage collections.

A full collection of CPython looks at every object. PyTorch and an engine are 200,000 of them: 0.1 seconds
without a token, several times a minute under load.
"""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Exclude today's objects from later collections; another call frees those no longer used."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
