"""Memory that weights on a CPU share."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM
from ingot.errors import OutOfMemoryError
from ingot.kernels.cpu import huge_pages, llvm_module
from ingot.kernels.cpu.huge_pages import CHUNK, huge_room
from tests.tiny_models import save_model, tiny_config


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


@pytest.mark.usefixtures("cpu_kernels")
def test_a_system_without_room_is_reported_with_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    save_model(tiny_config("llama"), tmp_path, seed=3)
    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(huge_pages, "_open", None)
    with pytest.raises(OutOfMemoryError, match="Cannot allocate memory") as raised:
        LLM(tmp_path, "cpu", quant="w8a16")
    assert raised.value.ledger is not None


@pytest.mark.parametrize("module", [huge_pages, llvm_module])
def test_a_fork_waits_for_the_thread_that_holds_the_lock(module: Any) -> None:
    """Which is not there in the fork: its lock would never be released."""
    held, timer = threading.Event(), threading.Event()

    def hold() -> None:
        with module._LOCK:
            held.set()
            timer.wait(0.02)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        free = module._LOCK.acquire(timeout=1)
        os._exit(0 if free else 1)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    assert not module._LOCK.locked()
