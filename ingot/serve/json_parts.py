"""Large answers as JSON, made a part at a time.

The event loop makes them, and every stream waits for it: a part takes a few milliseconds, and between two
parts the loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

PART_SECONDS = 0.004
PART_BYTES = 64 << 10
_AT_ONCE = 16  # items of a list that are encoded together
_encoder = msgspec.json.Encoder()


class LazyList:
    """A list whose items ``make`` gives when it is read; ``flat``: no item holds a ``LazyList`` itself."""

    def __init__(self, make: Callable[[], Iterable[Any]], *, flat: bool = True) -> None:
        self._make, self.flat = make, flat

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class _Count:
    now = 0  # answers that are being made


async def in_parts(value: Any, before: bytes = b"", after: bytes = b"") -> AsyncGenerator[bytes, None]:
    """A JSON value that may hold ``LazyList``, in parts, between two other texts. Several answers at once
    share the time of a part.
    """
    _Count.now += 1
    try:
        parts = _parts(value, before, after)
        held = next(parts)
        for data in parts:
            yield held
            held = data
            await asyncio.sleep(0)  # all others have their turn
        yield held
    finally:
        _Count.now -= 1


def _parts(value: Any, before: bytes, after: bytes) -> Iterator[bytes]:
    """Parts of ``PART_BYTES``, or of less where they take too long."""
    held, start = bytearray(before), time.perf_counter()
    for piece in _pieces(value):
        held += piece
        if len(held) >= PART_BYTES or time.perf_counter() - start >= PART_SECONDS / max(1, _Count.now):
            yield bytes(held)
            held, start = bytearray(), time.perf_counter()
    held += after
    yield bytes(held)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, LazyList):
        items, comma = iter(value), b"["
        while held := list(islice(items, _AT_ONCE if value.flat else 1)):
            yield comma
            if value.flat:
                yield _encoder.encode(held)[1:-1]
            else:
                yield from _pieces(held[0])
            comma = b","
        yield b"[]" if comma == b"[" else b"]"
    elif isinstance(value, dict) and any(isinstance(one, (LazyList, dict)) for one in value.values()):
        comma = b"{"
        for key, one in value.items():
            yield comma + _encoder.encode(key) + b":"
            yield from _pieces(one)
            comma = b","
        yield b"}"
    else:
        yield _encoder.encode(value)
