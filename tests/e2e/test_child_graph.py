"""A CUDA graph that begins others: what the driver is called with, and what kinds of sampling share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import LLM
from ingot.config.step_sizes import DRAW_KINDS
from ingot.errors import DeviceError
from ingot.runtime.encoding import child_graph
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import Newest
from ingot.runtime.step import graphs
from ingot.runtime.step.graphs import KINDS, DecodeGraphs

STREAM, PARENT, CHILD, NODE = 3, 5, 7, 11


class Driver:
    """Notes calls; ``codes``: what each returns, 0 where it says nothing."""

    def __init__(self, status: int = 1, **codes: int) -> None:
        self.status, self.codes = status, codes
        self.calls: list[tuple[Any, ...]] = []

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, *rest: Any) -> int:
        status._obj.value, graph._obj.value = self.status, PARENT
        self.calls.append(("info", stream.value))
        return self.codes.get("info", 0)

    def cuGraphAddChildGraphNode(self, node: Any, graph: Any, before: Any, count: Any, child: Any) -> int:
        node._obj.value = NODE
        self.calls.append(("add", graph.value, before.value, count.value, child.value))
        return self.codes.get("add", 0)

    def cuStreamUpdateCaptureDependencies(self, stream: Any, nodes: Any, count: Any, flags: Any) -> int:
        self.calls.append(("follow", stream.value, nodes._obj.value, count.value, flags.value))
        return self.codes.get("follow", 0)


def add(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_graph, "load_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    child_graph.add_child(SimpleNamespace(raw_cuda_graph=lambda: CHILD))  # type: ignore[arg-type]


def test_what_is_captured_next_follows_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    add(driver, monkeypatch)
    assert driver.calls == [("info", STREAM), ("add", PARENT, None, 0, CHILD), ("follow", STREAM, NODE, 1, 1)]


@pytest.mark.parametrize("call", ["info", "add", "follow"])
def test_a_driver_that_refuses_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"within a graph.*: error 801"):
        add(Driver(**{call: 801}), monkeypatch)


def test_outside_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(status=0)
    with pytest.raises(AssertionError):
        add(driver, monkeypatch)
    assert len(driver.calls) == 1, "no graph gets a node"


class Recorder:
    """Runs what is captured at once; a graph is the list of what was done."""

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[list[object]] = []

    def record(self, run: Any) -> tuple[list[object], Any]:
        self.graphs.append([])
        return self.graphs[-1], run()

    record_start = record


def test_one_run_of_the_model_for_all_kinds(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind's graph begins with the model's and draws from its logits, by the kind's own rules."""
    runner = LLM(folders["llama"], "cpu", max_batch_size=4).executor.runner
    monkeypatch.setattr(graphs, "Recorder", Recorder)
    decodes = DecodeGraphs(runner.forward, runner.feed, torch.device("cpu"), 4, runner.max_seq_len)
    recorder: Any = decodes._recorder
    models: list[torch.Tensor] = []
    drawn: list[tuple[Any, Any, Newest | None]] = []
    usual = runner.forward.__class__.__call__

    def run_model(forward: Any, batch: Any) -> torch.Tensor:
        models.append(usual(forward, batch))
        return models[-1]

    def leave(logits: torch.Tensor, draws: Any, feed: TokenFeed, newest: Newest | None = None) -> None:
        if recorder.graphs:
            recorder.graphs[-1].append("draws")
            drawn.append((logits, draws, newest))

    monkeypatch.setattr(runner.forward.__class__, "__call__", run_model)
    monkeypatch.setattr(graphs, "leave_tokens", leave)
    monkeypatch.setattr(graphs, "add_child", lambda start: recorder.graphs[-1].append(start))
    kinds = [KINDS[kind] for kind in DRAW_KINDS]
    decodes._capture_sharing(4, kinds)
    start, *others = recorder.graphs
    assert len(models) == 1
    assert models[0].shape[0] == 4
    assert all(graph == [start, "draws"] and graph[0] is start for graph in others)
    assert [decodes._captured[4, kind].graph for kind in kinds] == others
    assert all(logits is models[0] for logits, _, _ in drawn)
    assert all(newest is not None and newest.ids.shape == (4,) for _, _, newest in drawn)
    greedy, unfiltered, filtered, penalized, masked, best, logprobs = (draws for _, draws, _ in drawn)
    assert greedy.all_greedy
    assert not unfiltered.all_greedy
    assert (unfiltered.max_top_k, filtered.max_top_k) == (0, 1)
    assert penalized.any_rules
    assert not filtered.any_rules
    assert masked.any_masks
    assert not penalized.any_masks
    assert best.any_logprobs
    assert best.all_greedy
    assert logprobs.any_logprobs
    assert not masked.any_logprobs
