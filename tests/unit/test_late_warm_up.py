"""A warm-up whose larger part follows: what is done first, what stands in meanwhile, and how it ends."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.kernel_plan import KernelPlan
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import DRAW_KINDS, batch_buckets, request_buckets
from ingot.errors import DeviceError
from ingot.kernels import kept_kernels
from ingot.layers.step_layout import StepLayout
from ingot.runtime import late_warm_up
from ingot.runtime.encoding import child_graph
from ingot.runtime.executor import Executor
from ingot.runtime.late_warm_up import LateWarmUp, begin_warm_up, decode_parts, prompt_parts
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.step import graphs as decode_graphs
from ingot.runtime.step import prompt_graphs
from ingot.runtime.step.graphs import KINDS, DecodeGraphs
from ingot.runtime.step.layered_chunk import LayeredChunk
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.step_buffer import StepBuffer
from tests.tiny_models import random_ids, save_model, tiny_config
from tests.unit.fake_executor import check_empty, fake_executor


def prompts_of(*captured: tuple[int, int], most: int = 64) -> PromptGraphs:
    """With these graphs; ``capture`` adds one."""
    graphs = PromptGraphs.__new__(PromptGraphs)
    graphs.buckets = request_buckets(most)
    graphs._padded = {bucket: SimpleNamespace(bucket=bucket, graph=1) for bucket in captured}  # type: ignore[misc]
    graphs._missed = prompt_graphs.Counter()
    graphs.standing_in, graphs.full = True, False

    def step(bucket: tuple[int, int]) -> Any:
        return graphs._padded.setdefault(bucket, SimpleNamespace(bucket=bucket, graph=None))  # type: ignore[arg-type]

    graphs._step = step  # type: ignore[method-assign]
    graphs.capture = lambda bucket: setattr(step(bucket), "graph", 1)  # type: ignore[method-assign]
    return graphs


def chosen(graphs: PromptGraphs, *counts: int) -> tuple[tuple[int, int], bool]:
    """The bucket in which such a step runs, and whether by a graph."""
    step: Any = graphs._choose(*graphs.bucket_of(sum(counts), len(counts)))
    return step.bucket, step.graph is not None


def decodes_of(*captured: tuple[int, str], most: int = 64) -> DecodeGraphs:
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.buckets = batch_buckets(most)
    graphs._captured = {(size, KINDS[kind]): SimpleNamespace() for size, kind in captured}  # type: ignore[misc]
    graphs._missed = decode_graphs.Counter()
    graphs.standing_in, graphs.full = True, False
    return graphs


class TestStepsWithPrompts:
    def test_a_graph_of_more_requests_stands_in(self) -> None:
        graphs = prompts_of((64, 64), (128, 1), (128, 8), (128, 64))
        assert chosen(graphs, 60) == ((64, 64), True)
        assert chosen(graphs, 100) == ((128, 1), True)
        assert chosen(graphs, 50, 50) == ((128, 8), True)

    def test_none_of_fewer_requests_or_of_other_tokens_does(self) -> None:
        graphs = prompts_of((64, 1), (256, 8), (16, 64))
        assert chosen(graphs, 30, 30) == ((64, 8), False)
        assert chosen(graphs, 100) == ((128, 1), False)

    def test_a_bucket_is_captured_when_waiting_has_cost_as_much(self) -> None:
        graphs = prompts_of()
        found = [chosen(graphs, 60) for _ in range(prompt_graphs.PATIENCE + 2)]
        assert found == [((64, 1), False)] * prompt_graphs.PATIENCE + [((64, 1), True)] * 2
        assert chosen(graphs, 10) == ((16, 1), False), "each bucket has its own count"

    def test_a_graph_that_stands_in_costs_no_patience(self) -> None:
        graphs = prompts_of((64, 64))
        for _ in range(3 * prompt_graphs.PATIENCE):
            assert chosen(graphs, 60) == ((64, 64), True)

    def test_without_memory_none_is_captured(self) -> None:
        graphs = prompts_of((64, 8))
        graphs.standing_in, graphs.full = False, True
        for _ in range(2 * prompt_graphs.PATIENCE):
            assert chosen(graphs, 100) == ((128, 1), False)
            assert chosen(graphs, 60) == ((64, 8), True)

    def test_otherwise_a_bucket_is_captured_at_once(self) -> None:
        graphs = prompts_of((64, 64))
        graphs.standing_in = False
        assert chosen(graphs, 60) == ((64, 1), True)


class TestDecodes:
    def test_a_graph_of_a_larger_batch_and_the_same_kind_stands_in(self) -> None:
        graphs = decodes_of((16, "greedy"), (32, "greedy"), (32, "filtered"), (64, "greedy"))
        assert graphs._choose(5, KINDS["greedy"]) == 16
        assert graphs._choose(17, KINDS["greedy"]) == 32
        assert graphs._choose(5, KINDS["filtered"]) == 32
        assert graphs._choose(33, KINDS["greedy"]) == 64

    def test_without_one_the_batch_s_own_is_captured(self) -> None:
        graphs = decodes_of((8, "greedy"), (64, "filtered"))
        assert graphs._choose(9, KINDS["greedy"]) == 16
        assert graphs._choose(9, None) == 16
        graphs.full = True
        assert graphs._choose(9, KINDS["greedy"]) == 16

    def test_and_when_waiting_has_cost_as_much(self) -> None:
        graphs = decodes_of((64, "greedy"))
        found = [graphs._choose(20, KINDS["greedy"]) for _ in range(decode_graphs.PATIENCE + 1)]
        assert found == [64] * decode_graphs.PATIENCE + [24]
        graphs.full = True
        assert graphs._choose(20, KINDS["greedy"]) == 64

    def test_otherwise_at_once(self) -> None:
        graphs = decodes_of((64, "greedy"))
        graphs.standing_in = False
        assert graphs._choose(20, KINDS["greedy"]) == 24


@pytest.mark.parametrize(
    ("most", "coarse"),
    [(1, [1]), (4, [1, 4]), (48, [1, 4, 16, 48]), (64, [1, 4, 16, 64]), (300, [1, 4, 16, 64, 256, 304])],
)
def test_batch_sizes_in_powers_of_four_come_first(
    most: int, coarse: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, captured = decodes_of(most=most), []
    monkeypatch.setattr(graphs, "warm_up", lambda size, kinds: captured.append((size, tuple(kinds))))
    now, later = decode_parts(graphs, most, DRAW_KINDS)
    for part in now:
        part()
    assert captured == [(size, DRAW_KINDS) for size in coarse]
    for part in later:
        part()
    assert {size for size, kinds in captured if kinds == DRAW_KINDS} == set(graphs.buckets)


def test_graphs_that_stand_in_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, captured = prompts_of(), []
    monkeypatch.setattr(graphs, "capture", captured.append)
    for part in prompt_parts(graphs, 10, 100):
        part()
    assert captured[:5] == [(16, 64), (32, 64), (64, 64), (128, 64), (16, 8)]
    assert sorted(captured) == sorted(graphs.sizes(10, 100))


def fake_runner(**values: Any) -> Any:
    graphs = [SimpleNamespace(standing_in=True, full=False) for _ in range(2)]
    return SimpleNamespace(device=torch.device("cpu"), graphs=graphs[0], prompts=graphs[1], **values)


class TestLateWarmUp:
    def test_parts_are_done_one_by_one(self) -> None:
        runner, done = fake_runner(), []
        late = LateWarmUp(runner, [lambda: done.append(1), lambda: done.append(2)])
        assert (late.left, done) == (2, [])
        late.do_part()
        assert (late.left, done) == (1, [1])
        assert runner.graphs.standing_in
        late.do_part()
        assert (late.left, done) == (0, [1, 2])
        assert [graphs.standing_in for graphs in (runner.graphs, runner.prompts)] == [False, False]
        late.do_part()
        assert done == [1, 2]

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")])
    def test_without_memory_the_others_are_left_out(
        self, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise error

        runner, done = fake_runner(), []
        late = LateWarmUp(runner, [fail, lambda: done.append(1)])
        with caplog.at_level(logging.WARNING):
            late.do_part()
        assert "no memory for 2 more CUDA graphs" in caplog.text
        assert (late.left, done) == (0, [])
        for graphs in (runner.graphs, runner.prompts):
            assert (graphs.standing_in, graphs.full) == (False, True)

    def test_the_driver_s_lack_of_memory_is_one(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            child_graph._check("cuGraphAddChildGraphNode", 2)  # CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(DeviceError, match="error 3"):
            child_graph._check("cuGraphAddChildGraphNode", 3)

    def test_other_errors_end_the_process(self) -> None:
        late = LateWarmUp(fake_runner(), [lambda: 1 / 0])  # type: ignore[list-item, return-value]
        with pytest.raises(ZeroDivisionError):
            late.do_part()


SETTING: Any = SimpleNamespace(to_json=lambda: {"dtype": "fp16"})
PLAN = KernelPlan()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Built kernels' folder, and a card."""
    monkeypatch.setattr(kept_kernels, "find_kernel_folder", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return tmp_path


@pytest.mark.usefixtures("notes")
class TestBeginning:
    def executor(self, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> tuple[Executor, Any]:
        """One whose parts note what they do, and whether graphs stand in."""
        executor, fake = fake_executor(2000, token_budget=64, max_batch_size=8)
        runner: Any = fake
        executor.setting = SETTING

        def note(what: str) -> Any:
            return lambda *_: events.append(f"{what}, {runner.graphs.standing_in}")

        runner.graphs, runner.prompts = decodes_of(most=8), prompts_of(most=8)
        runner.graphs.standing_in = runner.prompts.standing_in = False
        runner.most_tokens, runner.layered = 70, SimpleNamespace(warm_up_parts=lambda: [note("chunk")])
        monkeypatch.setattr(runner.graphs, "warm_up", note("decodes"))
        monkeypatch.setattr(runner.prompts, "capture", note("prompts"))
        monkeypatch.setattr(late_warm_up, "on_device", lambda device: nullcontext())
        monkeypatch.setattr(late_warm_up, "warm_up", lambda executor: events.append("all"))
        step = executor.step
        monkeypatch.setattr(executor, "step", lambda: (note("step")(), step())[1])
        return executor, runner

    def test_what_first_requests_need_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        executor, runner = self.executor(monkeypatch, events)
        assert begin_warm_up(executor, PLAN).left == 0
        assert events == ["all"], "kernels may be missing"
        del events[:]
        late = begin_warm_up(executor, PLAN)
        assert events == [*["decodes, False"] * 3, "step, True"]
        check_empty(executor)
        del events[:]
        while late.left:
            late.do_part()
        assert events.count("prompts, True") == len(runner.prompts.sizes(8, 70))
        assert events.count("chunk, True") == 1
        assert "step, True" not in events, "what requests left in the prefix cache stays"
        assert [graphs.standing_in for graphs in (runner.graphs, runner.prompts)] == [False, False]
        check_empty(executor)

    @pytest.mark.parametrize("what", ["the plan", "the setting", "the card", "the code", "the folder"])
    def test_another_start_builds_its_own(
        self, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        events: list[str] = []
        executor, _ = self.executor(monkeypatch, events)
        begin_warm_up(executor, PLAN)
        plan = KernelPlan({"rms_norm": {"m1,h64": {"num_warps": 2}}}) if what == "the plan" else PLAN
        if what == "the setting":
            executor.setting = SimpleNamespace(to_json=lambda: {"dtype": "bf16"})  # type: ignore[assignment]
        if what == "the card":
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
        if what == "the code":
            monkeypatch.setattr(kept_kernels, "code_seen", lambda: "later")
        if what == "the folder":
            monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
        begin_warm_up(executor, plan)
        assert events == ["all", "all"]

    @pytest.mark.parametrize("what", ["a folder", "a file", "all of them"])
    def test_a_start_after_kernels_were_removed_builds_them_again(
        self, what: str, monkeypatch: pytest.MonkeyPatch, notes: Path
    ) -> None:
        """As a cleaner does that removes old files; a kernel that was never built is not missed."""
        events: list[str] = []
        executor, _ = self.executor(monkeypatch, events)
        monkeypatch.setattr(late_warm_up, "noted_folders", lambda: {"FIRST", "SECOND", "NEVER"})
        (notes / "NEVER").mkdir()

        def build() -> None:
            for name in ("FIRST", "SECOND", "OTHERS"):
                (notes / name).mkdir(exist_ok=True)
                for end in ("json", "cubin"):
                    (notes / name / f"kernel.{end}").touch()

        monkeypatch.setattr(late_warm_up, "warm_up", lambda executor: (events.append("all"), build()))
        begin_warm_up(executor, PLAN)
        shutil.rmtree(notes / "OTHERS")
        assert begin_warm_up(executor, PLAN).left
        assert events.pop(0) == "all"
        assert "all" not in events
        for name in ("FIRST", "SECOND") if what == "all of them" else ("SECOND",):
            if what == "a file":
                (notes / name / "kernel.cubin").unlink()
            else:
                shutil.rmtree(notes / name)
        del events[:]
        assert begin_warm_up(executor, PLAN).left == 0
        assert events == ["all"]
        assert begin_warm_up(executor, PLAN).left, "a new note"

    @pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"FIRST": "two"}', '{"\\u0000": 1}', "\udcff"])
    def test_a_note_that_is_none_is_written_again(
        self, text: str, monkeypatch: pytest.MonkeyPatch, notes: Path
    ) -> None:
        events: list[str] = []
        executor, _ = self.executor(monkeypatch, events)
        (notes / "FIRST").mkdir()
        begin_warm_up(executor, PLAN)
        (note,) = (notes / "ingot-starts").iterdir()
        note.write_bytes(text.encode("utf-8", errors="surrogateescape"))
        assert begin_warm_up(executor, PLAN).left == 0
        assert begin_warm_up(executor, PLAN).left

    def test_a_warm_up_that_fails_leaves_no_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        executor, _ = self.executor(monkeypatch, events)
        monkeypatch.setattr(late_warm_up, "warm_up", lambda executor: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                begin_warm_up(executor, PLAN)

    def test_a_folder_that_takes_no_note_is_no_error(
        self, monkeypatch: pytest.MonkeyPatch, notes: Path
    ) -> None:
        events: list[str] = []
        executor, _ = self.executor(monkeypatch, events)
        (notes / "ingot-starts").write_text("a file in its place")
        for _ in range(2):
            assert begin_warm_up(executor, PLAN).left == 0
        assert events == ["all", "all"]

    @pytest.mark.parametrize("why", ["an encoder", "no graphs", "no graphs of prompts"])
    def test_others_are_warmed_up_at_once(self, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        executor, runner = self.executor(monkeypatch, events)
        if why == "an encoder":
            executor.admission = replace(executor.admission, inputs=SimpleNamespace())  # type: ignore[arg-type]
        elif why == "no graphs":
            runner.graphs = None
        else:
            runner.prompts = None
        for _ in range(2):
            assert begin_warm_up(executor, PLAN).left == 0
        assert events == ["all", "all"]


def test_a_file_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "ingot" / "kernels" / "kept_kernels.py"
    place.parent.mkdir(parents=True)
    place.write_text("a = 1")
    monkeypatch.setattr(kept_kernels, "__file__", str(place))
    seen = [kept_kernels.code_seen.__wrapped__()]
    for change in ("a = 2", "a = 22"):
        place.write_text(change)
        seen.append(kept_kernels.code_seen.__wrapped__())
    (place.parent / "new.py").touch()
    seen.append(kept_kernels.code_seen.__wrapped__())
    assert len(set(seen)) == 4


@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_a_step_without_its_graph_gives_what_a_step_gives(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths, alone and beside decodes, all of them padded and none captured."""
    save_model(tiny_config("llama", max_position_embeddings=512), tmp_path, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, token_budget=64, fused_decode=False)
    llm = LLM(tmp_path, device="cpu", quant=quant, max_batch_size=16, runtime=runtime)
    runner = llm.executor.runner
    prompts = [random_ids(n, seed=n) for n in (9, 70, 1, 130, 33, 2, 64, 17)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3)
    wanted = [*llm.generate(prompts, params), *llm.generate(prompts[3:4], params)]
    monkeypatch.setattr("ingot.runtime.step.prompt_graphs.Recorder", lambda device: None)
    graphs = PromptGraphs(runner.forward, runner.feed, runner.device, 16, 512)
    graphs.full, runner.prompts = True, graphs
    found = [*llm.generate(prompts, params), *llm.generate(prompts[3:4], params)]
    assert {requests for _, requests in graphs._padded} >= {1, 8}
    assert graphs.captured == []
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert [p.logprob for p in one.logprobs] == pytest.approx(
            [p.logprob for p in other.logprobs], abs=1e-4
        )


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("standing_in", [False, True])
def test_captures_without_memory_end_neither_steps_nor_engine(
    run_ahead: bool,
    standing_in: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts and decodes give what they give without graphs; each kind is logged once."""
    save_model(tiny_config("llama", max_position_embeddings=512), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", max_batch_size=8, runtime=RuntimeConfig(prefix_reuse=False))
    runner, tried = llm.executor.runner, []
    prompts = [random_ids(n, seed=n) for n in (9, 70, 1, 130, 33)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    wanted = [[out.token_ids for out in llm.generate(some, params)] for some in (prompts, prompts[:1])]

    def record(run: Any) -> None:
        tried.append(run)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    for family in ("graphs", "prompt_graphs"):
        monkeypatch.setattr(f"ingot.runtime.step.{family}.Recorder", lambda _: SimpleNamespace(record=record))
        monkeypatch.setattr(f"ingot.runtime.step.{family}.PATIENCE", 3)
    parts = runner.forward, runner.feed, runner.device, 8, 512
    runner.graphs, runner.prompts = DecodeGraphs(*parts), PromptGraphs(*parts)
    runner.graphs.standing_in = runner.prompts.standing_in = standing_in
    llm.executor.run_ahead = run_ahead
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            for some, expected in zip((prompts, prompts[:1]), wanted, strict=True):
                assert [out.token_ids for out in llm.generate(some, params)] == expected
    assert runner.graphs.full
    assert runner.prompts.full
    lines = sorted(line for line in caplog.messages if "no memory for more CUDA graphs" in line)
    assert ["decode steps" in line for line in lines] == [True, False]
    assert len(runner.graphs._without) > 1
    assert len(tried) == 1 + len(runner.graphs._without), "each batch size is tried once, prompts once at all"


class TestDecodesWithoutMemory:
    def graphs(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> DecodeGraphs:
        """A graph of 64 requests; others cannot be captured."""
        graphs = decodes_of((64, "greedy"))
        graphs._without, graphs.standing_in = set(), False

        def capture(bucket: int, kind: Any) -> None:
            raise error

        monkeypatch.setattr(graphs, "_capture", capture)
        return graphs

    def test_a_larger_batch_s_graph_stands_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs = self.graphs(monkeypatch, torch.OutOfMemoryError())
        larger = graphs._captured[64, KINDS["greedy"]]
        assert graphs._graph_for(20, KINDS["greedy"]) == (64, larger)
        assert graphs.full
        assert graphs._graph_for(20, KINDS["filtered"]) == (24, None)

    def test_other_errors_are_the_step_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs = self.graphs(monkeypatch, RuntimeError("CUDA error: an illegal memory access"))
        with pytest.raises(RuntimeError, match="illegal"):
            graphs._graph_for(20, KINDS["greedy"])
        assert not graphs.full

    def test_tokens_that_wait_for_their_step_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A launch before a capture draws tokens of its own, and may end in the middle."""
        graphs = decodes_of()
        table = torch.arange(64)
        graphs.feed, graphs.max_seq_len = SimpleNamespace(table=table), 64  # type: ignore[assignment]
        batch = SimpleNamespace(input_ids=None, logits_indices=None)
        buffer = SimpleNamespace(
            fill_padding=int, upload=id, padded_batch=lambda *_: batch, feed_rows=None, draws=lambda *_: None
        )
        graphs.forward = SimpleNamespace(launch_some=lambda batch: None)  # type: ignore[assignment]
        monkeypatch.setattr(graphs, "_buffer", lambda bucket: buffer)
        for name in ("take_tokens", "replace", "Newest"):
            monkeypatch.setattr(decode_graphs, name, lambda *_, **__: None)

        def leave(*_: Any) -> None:
            table.zero_()
            raise torch.OutOfMemoryError

        monkeypatch.setattr(decode_graphs, "leave_tokens", leave)
        with pytest.raises(torch.OutOfMemoryError):
            graphs._launch_once(8, [KINDS["greedy"]])
        assert torch.equal(table, torch.arange(64))


def keys_of(llm: LLM) -> list[torch.Tensor]:
    return [cache.keys.clone() for cache in llm.executor.runner.caches]


def test_a_capture_writes_nothing_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of a bucket that ran without its graph still has that step; its cached keys stay."""
    config = {
        "max_position_embeddings": 512,
        "num_hidden_layers": 4,
    }  # a launch of some layers leaves out two
    save_model(tiny_config("llama", **config), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", max_batch_size=16, runtime=RuntimeConfig(token_budget=64))
    runner = llm.executor.runner
    recorder = SimpleNamespace(record=lambda run: (SimpleNamespace(), None))
    monkeypatch.setattr("ingot.runtime.step.prompt_graphs.Recorder", lambda device: recorder)
    graphs = PromptGraphs(runner.forward, runner.feed, runner.device, 16, 512)
    graphs.full, runner.prompts = True, graphs
    llm.generate([random_ids(n, seed=n) for n in (9, 70, 33)], SamplingParams(max_new_tokens=1))
    kept, ran = keys_of(llm), list(graphs._padded)
    assert ran
    assert graphs.captured == []
    upload, sent = StepBuffer.upload, []  # a CPU's buffer needs none, a GPU's keeps its values without one
    monkeypatch.setattr(StepBuffer, "upload", lambda buffer: (sent.append(buffer), upload(buffer)))
    with torch.inference_mode():
        for bucket in ran:
            graphs.capture(bucket)
    assert graphs.captured == ran
    assert sent == [graphs._padded[bucket].buffer for bucket in ran]
    for now, before in zip(keys_of(llm), kept, strict=True):
        assert torch.equal(now, before)


def test_a_layered_chunk_s_warm_up_writes_nothing_of_a_chunk_before(tmp_path: Path) -> None:
    save_model(tiny_config("llama", max_position_embeddings=512), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", max_batch_size=2)
    runner = llm.executor.runner
    chunk = LayeredChunk(runner.forward, Pace(0.1, 2), runner.device, runner.max_seq_len)
    buffer = chunk._buffer(chunk.pace.sizes[0])
    size = runner.block_size
    buffer.fill(StepLayout.of([0], [min(chunk.pace.sizes[0], 3 * size)], [range(3)], size))
    buffer.upload()
    kept = keys_of(llm)
    for part in chunk.warm_up_parts():
        part()
    for now, before in zip(keys_of(llm), kept, strict=True):
        assert torch.equal(now, before)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["none", "w4a16", "w8a8"])
def test_graphs_of_a_late_warm_up_give_what_their_kernels_give(quant: str, tmp_path: Path) -> None:
    """Every bucket bit for bit, over random tokens, in the order and the thread of a server."""
    config = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    save_model(tiny_config("llama", **config), tmp_path, seed=3)
    for start in range(2):
        llm = LLM(tmp_path, "cuda", compute_dtype="fp16", quant=quant, max_batch_size=16)
        late = begin_warm_up(llm.executor, llm.engine.plan)
        assert start == 0 or late.left > 40
        while late.left:
            late.do_part()
    graphs, vocab = llm.executor.runner.prompts, llm.engine.manifest.model.vocab_size
    assert graphs is not None
    assert set(graphs.captured) == set(graphs.sizes(16, llm.executor.runner.most_tokens))
    size = llm.executor.runner.block_size
    most = -(-16 // size)  # blocks of a request
    for tokens, requests in graphs.captured:
        step, count = graphs._padded[tokens, requests], min(requests, tokens // 4, 16)
        each = min(tokens // count, 16)
        blocks = [range(at * most, at * most + -(-each // size)) for at in range(count)]
        step.buffer.fill(StepLayout.of([0] * count, [each] * count, blocks, size))
        with torch.inference_mode():
            step.buffer.upload()
            step.batch.input_ids.copy_(torch.randint(vocab, (tokens,), device="cuda"))
        found = []
        for way in (step.graph.replay, partial(graphs._compute, step)):  # type: ignore[union-attr]
            with torch.inference_mode():
                graphs._logits.fill_(math.nan)
                way()
            found.append(graphs._logits[:count].clone())
        assert found[0].isfinite().all(), (tokens, requests)
        assert torch.equal(*found), (tokens, requests)
