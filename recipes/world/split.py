"""Which entity combinations are never trained on.

An item is held out by a stable hash of what makes it this item.

    is_held_out("sum", "12+30")
"""

from __future__ import annotations

import zlib

from recipes.world.conversation import Split

HELD_OUT_SHARE = 16


def is_held_out(task: str, key: str) -> bool:
    """True for one key in 16 of a task, the same on every machine and in every run."""
    return zlib.crc32(f"{task}|{key}".encode()) % HELD_OUT_SHARE == 0


def belongs(task: str, key: str, split: Split) -> bool:
    """True where ``key`` may be used in ``split``."""
    return is_held_out(task, key) == (split == "held-out")
