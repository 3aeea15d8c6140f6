"""Memory that weights on a CPU share."""

from __future__ import annotations

import gc

import torch

from ingot.kernels.cpu import huge_pages
from ingot.kernels.cpu.huge_pages import CHUNK, huge_room


def test_rooms_are_aligned_empty_and_apart() -> None:
    rooms = [huge_room(size) for size in (1, 100, 64, CHUNK - 50, 7, CHUNK + 1, 3)]
    for number, room in enumerate(rooms):
        assert room.data_ptr() % 64 == 0
        assert not room.any()
        room.fill_(number + 1)
    for number, room in enumerate(rooms):
        assert (room == number + 1).all()


def test_small_rooms_share_a_chunk_that_ends_with_the_last_of_them() -> None:
    huge_room(CHUNK)
    first, second = huge_room(10), huge_room(10)
    assert second.data_ptr() - first.data_ptr() == 64
    chunk = huge_pages._open
    assert chunk is not None
    del first
    gc.collect()
    assert chunk() is not None
    assert torch.equal(second, torch.zeros(10, dtype=torch.uint8))
    del second
    gc.collect()
    assert chunk() is None
