"""A warm-up captures what the first requests would wait for, sampled ones included."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot import LLM, SamplingParams
from ingot.config.step_sizes import batch_buckets
from ingot.errors import RequestError
from ingot.runtime.graphs import KINDS, DecodeGraphs
from ingot.runtime.runner import Runner


def test_each_size_is_captured_in_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.buckets = batch_buckets(4)
    monkeypatch.setattr(graphs, "_capture", lambda bucket, kind: captured.append((bucket, kind)))
    Runner.warm_up(SimpleNamespace(graphs=graphs), [1, 3], ["greedy", "filtered"])  # type: ignore[arg-type]
    assert captured == [(bucket, KINDS[kind]) for bucket in (1, 4) for kind in ("greedy", "filtered")]


def test_unknown_kinds_are_named(folders: dict[str, Path]) -> None:
    llm = LLM(folders["llama"], "cpu", max_batch_size=2)
    llm.warm_up([1], kinds=["greedy"])
    llm.warm_up()
    with pytest.raises(RequestError, match=r"unknown kind of sampling.*greedy, unfiltered, filtered.*kinds"):
        llm.warm_up([1], kinds=["greedy", "beams"])


@pytest.mark.gpu
def test_no_kind_of_sampling_waits_for_a_capture(folders: dict[str, Path]) -> None:
    llm = LLM(folders["llama"], "cuda", compute_dtype="fp16", max_batch_size=4, max_seq_len=64)
    graphs = llm.executor.runner.graphs
    assert graphs is not None
    llm.warm_up([1], kinds=["greedy"])
    assert {kind for _, kind in graphs._captured} == {KINDS["greedy"]}
    llm.warm_up()
    captured = {(bucket, kind) for bucket in (1, 2, 4) for kind in KINDS.values()}
    assert set(graphs._captured) == captured
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for values in (params, params.replace(temperature=1.0), params.replace(temperature=1.0, top_k=5)):
        llm.generate([[5, 6], [7]], values)
    assert set(graphs._captured) == captured
