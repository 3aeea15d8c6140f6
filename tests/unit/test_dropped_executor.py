"""An executor is dropped when the device is done: until then kernels use the host's memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from ingot import LLM
from ingot.errors import EngineError
from ingot.llm.engine_loop import ExecutorLoop
from ingot.runtime.executor import Executor
from tests.tiny_models import save_model, tiny_config
from tests.unit.fake_executor import fake_executor

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Waits:
    """Waits for a device: each is whether the memory that its kernels write was still there."""

    def __init__(self, executor: Executor, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[bool] = []
        self.error: Exception | None = None
        self._feed = weakref.ref(executor.runner.feed)
        executor.runner.device = device
        monkeypatch.setattr(torch.cuda, "synchronize", self._wait)

    def _wait(self, device: torch.device) -> None:
        assert device == GPU
        self.seen.append(self.memory_is_held)
        if self.error is not None:
            raise self.error

    @property
    def memory_is_held(self) -> bool:
        return self._feed() is not None


def test_a_loop_that_is_closed_or_dropped_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for closed in (True, False):
        executor, runner = fake_executor()
        waits = Waits(executor, GPU, monkeypatch)
        loop = ExecutorLoop(executor)
        del executor, runner
        if closed:
            loop.close()
        del loop
        gc.collect()
        assert waits.seen == [True]
        assert not waits.memory_is_held


def test_a_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = fake_executor()
    waits = Waits(executor, CPU, monkeypatch)
    ExecutorLoop(executor).close()
    assert waits.seen == []


def test_a_device_that_has_failed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block's own error is what comes out, and the LLM is closed."""
    save_model(tiny_config("llama"), tmp_path, seed=1)
    llm = LLM(tmp_path, device="cpu", max_batch_size=2)
    waits = Waits(llm.executor, GPU, monkeypatch)
    waits.error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")
    with pytest.raises(KeyError, match="first"), llm:
        raise KeyError("first")
    assert waits.seen == [True]
    assert repr(llm) == "LLM(closed)"
    with pytest.raises(EngineError, match="closed"):
        llm.generate("more")
    assert caplog.messages == [
        "cuda:0 failed before its last work was done: CUDA error: an illegal memory access was encountered"
    ]
