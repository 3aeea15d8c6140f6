"""Large answers as JSON, made a part at a time.

The event loop makes them, and every stream waits for it: a part takes a few milliseconds, and between two
parts the loop goes on. Independent of what the values mean.

    async for data in in_parts({"choices": LazyList(lambda: map(entry, tokens))}): ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

import msgspec

PART_SECONDS = 0.004
PART_BYTES = 64 << 10
_AT_ONCE = 16  # items of a list that are encoded together
_encoder = msgspec.json.Encoder()


class LazyList:
    """A list whose items are made when it is read.

    Args:
        make: gives the items from the first on.
        flat: whether no item holds rows itself.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], *, flat: bool = True) -> None:
        self._make, self.flat = make, flat

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class _Count:
    """How many answers are being made."""

    now = 0


async def in_parts(value: Any, before: bytes = b"", after: bytes = b"") -> AsyncGenerator[bytes, None]:
    """A JSON value that may hold ``LazyList``, as bytes between two others. Several at once share the time of
    a part.
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
    """Bytes after so much of them, or so much time."""
    held, start = bytearray(before), time.perf_counter()
    for piece in _pieces(value):
        held += piece
        if len(held) >= PART_BYTES or time.perf_counter() - start >= PART_SECONDS / max(1, _Count.now):
            yield bytes(held)
            held, start = bytearray(), time.perf_counter()
    held += after
    yield bytes(held)


def _pieces(value: Any) -> Iterator[bytes]:
    """Bytes, little by little."""
    if isinstance(value, LazyList):
        yield b"["
        yield from _flat_items(value) if value.flat else _items(value)
        yield b"]"
    elif isinstance(value, dict) and any(isinstance(one, (LazyList, dict)) for one in value.values()):
        comma = b"{"
        for key, one in value.items():
            yield comma + _encoder.encode(key) + b":"
            yield from _pieces(one)
            comma = b","
        yield b"}"
    else:
        yield _encoder.encode(value)


def _items(rows: LazyList) -> Iterator[bytes]:
    comma = b""
    for item in rows:
        yield comma
        yield from _pieces(item)
        comma = b","


def _flat_items(rows: LazyList) -> Iterator[bytes]:
    comma, held = b"", []
    for item in rows:
        held.append(item)
        if len(held) == _AT_ONCE:
            yield comma + _encoder.encode(held)[1:-1]
            comma, held = b",", []
    if held:
        yield comma + _encoder.encode(held)[1:-1]
