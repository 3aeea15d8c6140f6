"""Bytes that tensors hold while a block runs, counted at every operation.

A storage counts from the operation that makes it until it is freed. What an operation uses internally is
not counted.

    with AllocationTracker() as tracker: model(x)
    tracker.peak
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationTracker(TorchDispatchMode):
    """``peak``: most bytes alive at once, of storages made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in before | self._known:
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), id_of(tensor)
        size = storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def id_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    return tensor.untyped_storage()._cdata
