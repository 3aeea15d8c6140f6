"""A GPU's context is begun before PyTorch is imported; no wrong device or missing driver ends a start."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from ingot.serve.engine_calls.early_context import begin_context


class Driver:
    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[Any, ...]] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append(("init", flags))
        return self.codes.get("init", 0)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        self.calls.append(("device", index))
        device._obj.value = 70 + index
        return self.codes.get("device", 0)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.calls.append(("context", device.value))
        return 0


def begun(device: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = begin_context(device)
    if thread is not None:
        thread.join(10)
    return driver.calls


@pytest.mark.parametrize(
    ("device", "index"), [(None, 0), ("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)]
)
def test_of_the_device_that_the_engine_takes(
    device: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = begun(device, Driver(), monkeypatch)
    assert calls == [("init", 0), ("device", index), ("context", 70 + index)]


@pytest.mark.parametrize(
    "device", ["cpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999", "CUDA", "", "gpus", "cüda"]
)
def test_no_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = begun(device, Driver(), monkeypatch)
    assert calls == ([] if device else [("init", 0), ("device", 0), ("context", 70)])


@pytest.mark.parametrize(("code", "count"), [({"init": 100}, 1), ({"device": 101}, 2)])
def test_a_driver_that_refuses_is_left_to_pytorch(
    code: dict[str, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(begun(None, Driver(**code), monkeypatch)) == count


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = begin_context(None)
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(("given", "expected"), [(None, "LAZY"), ("EAGER", "EAGER")])
def test_the_environment_is_set_before_the_thread_starts(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports beside it read the environment; the user's own value stays."""
    seen = []
    monkeypatch.setenv("CUDA_MODULE_LOADING", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.setattr(threading.Thread, "start", lambda thread: seen.append(dict(os.environ)))
    begin_context(None)
    assert [one.get("CUDA_MODULE_LOADING") for one in seen] == [expected]


def test_it_is_begun_without_pytorch() -> None:
    """Else it would wait for what it runs beside."""
    code = (
        "import sys; from ingot.serve.engine_calls.early_context import begin_context; begin_context('cpu'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
