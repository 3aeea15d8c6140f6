"""Captures of CUDA graphs are not cut short by garbage that another engine left."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from ingot.runtime.encoding import recording
from ingot.runtime.encoding.recording import Recorder


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_during_a_capture(
    fails: bool, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And afterwards as before, also if the captured function fails; the next capture does not wait."""
    monkeypatch.setattr(recording, "torch", SimpleNamespace(cuda=MagicMock()))
    seen = []

    def run() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("the step failed")

    recorder, before = Recorder(torch.device("cpu")), gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        for _ in range(2):
            if fails:
                with pytest.raises(ValueError, match="the step failed"):
                    recorder.record(run)
            else:
                recorder.record(run)
            assert gc.isenabled() is collects
    finally:
        gc.enable() if before else gc.disable()
    assert seen == [False, False]


def test_captures_of_two_threads_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to end would else let garbage be collected during the other."""
    monkeypatch.setattr(recording, "torch", SimpleNamespace(cuda=MagicMock()))
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def slow() -> None:
        entered.set()
        assert leave.wait(30)
        order.append("first")

    first, second = (
        threading.Thread(target=Recorder(torch.device("cpu")).record, args=(run,))
        for run in (slow, lambda: order.append("second"))
    )
    first.start()
    assert entered.wait(30)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    leave.set()
    for thread in (first, second):
        thread.join(30)
    assert order == ["first", "second"]


@pytest.mark.gpu
def test_a_dropped_graph_does_not_end_a_capture() -> None:
    """It hangs in a cycle, so that whoever allocates next frees it."""
    device, before = torch.device("cuda", 0), gc.get_threshold()
    recorder, x = Recorder(device), torch.ones(8, device=device)
    leaves = []

    def run() -> None:
        x.add_(1)
        leaves.extend([] for _ in range(10_000))
        x.add_(1)

    run()
    dropped = SimpleNamespace(graph=Recorder(device).record(run)[0])
    dropped.itself = dropped
    del dropped
    try:
        gc.set_threshold(10, 1, 1)
        graph, _ = recorder.record(run)
    finally:
        gc.set_threshold(*before)
    x.fill_(1)
    graph.replay()
    assert x.tolist() == [3.0] * 8
