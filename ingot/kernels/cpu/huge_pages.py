"""Memory in pages of 2 MiB for weights that every step reads: a processor finds the next page itself.

values = huge_room(nbytes)                     # uint8 [nbytes], zeros; freed with the last of its chunk
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref

import torch

CHUNK = 32 << 20  # bytes that small weights share
_ALIGNMENT = 64  # a vector's
_LOCK = threading.Lock()
# A fork waits for the thread that holds the lock, and finds what it guards complete.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_open: weakref.ref[mmap.mmap] | None = None  # the chunk that has room left
_used = 0


def huge_room(nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], at an address of a multiple of 64. Where the system has no such pages, in its
    usual ones.
    """
    global _open, _used
    with _LOCK:
        chunk = None if _open is None else _open()
        if chunk is None or _used + nbytes > len(chunk):
            chunk = mmap.mmap(-1, max(nbytes, CHUNK, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):  # advice, which some systems do not take
                chunk.madvise(mmap.MADV_HUGEPAGE)
            _open, _used = weakref.ref(chunk), 0
        start, _used = _used, -(-(_used + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return torch.frombuffer(chunk, dtype=torch.uint8, count=nbytes, offset=start)
