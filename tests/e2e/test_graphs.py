"""Steps with prompts as CUDA graphs give what eager steps give; a warm-up captures what requests would wait
for.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import (
    DRAW_KINDS,
    TOKEN_BUCKETS,
    batch_buckets,
    request_buckets,
    tile_list_length,
)
from ingot.errors import RequestError
from ingot.kernels.sampling.feed_tokens import take_tokens
from ingot.layers.step_layout import StepLayout
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.step.graphs import KINDS, DecodeGraphs, sampling_kind
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.runner import Runner
from tests.e2e.watch import check_idle, watch
from tests.tiny_models import random_ids, save_model, tiny_config
from tests.unit.fake_matcher import FakeMatcher


def layout_with(*counts: int, all_logits: bool = False) -> StepLayout:
    blocks = [range(count) for count in counts]
    return StepLayout.of([0] * len(counts), counts, blocks, 1, wanted=counts if all_logits else None)


@pytest.fixture
def graphs() -> PromptGraphs:
    graphs = PromptGraphs.__new__(PromptGraphs)
    graphs.buckets = request_buckets(64)
    return graphs


def test_buckets(graphs: PromptGraphs) -> None:
    assert graphs.buckets == (1, 8, 64)
    assert graphs.bucket_of(1, 1) == (16, 1)
    assert graphs.bucket_of(64, 8) == (64, 8)
    assert graphs.bucket_of(65, 9) == (128, 64)
    assert graphs.bucket_of(1025, 2) == (1280, 8)
    assert request_buckets(1) == (1,)
    assert request_buckets(65) == (1, 8, 64, 256)
    assert request_buckets(1000) == (1, 8, 64, 256)


def test_padding_of_a_long_step_is_small() -> None:
    for below, size in pairwise(TOKEN_BUCKETS):
        assert (size - below) / size <= (0.5 if size <= 128 else 0.34 if size < 512 else 0.2)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("counts", [[2] * 32, [64], [17] * 3, [33, 31], [65, 2, 2]])
def test_a_list_of_tiles_holds_any_step(counts: list[int], rows: int) -> None:
    tokens = -(-sum(counts) // 64) * 64
    assert sum(-(-count // rows) for count in counts) <= tile_list_length(tokens, len(counts), rows)


@pytest.mark.parametrize(
    ("counts", "fits"),
    [
        ((2,), True),
        ((1024,), True),
        ((512, 100), True),
        ((1100,), True),
        ((2176,), True),
        ((2177,), False),
        ((1, 40), True),  # a decode
        ((9,) * 64, True),
        ((9,) * 65, False),
    ],
)
def test_which_steps_fit(counts: tuple[int, ...], fits: bool, graphs: PromptGraphs) -> None:
    assert graphs.fits(layout_with(*counts)) == fits
    assert not graphs.fits(layout_with(*counts, all_logits=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_graphs_are_eager(tmp_path: Path, kind: str) -> None:
    """Also where programs share the keys of a long prompt's last chunks, as they do in graphs alone."""
    save_model(
        tiny_config(kind, **({} if kind == "gpt2" else {"max_position_embeddings": 1024})), tmp_path, seed=3
    )
    runtime = RuntimeConfig(prefix_reuse=False, token_budget=64)
    llm = LLM(tmp_path, device="cuda", compute_dtype="fp16", max_batch_size=4, runtime=runtime)
    prompts = [random_ids(n, seed=n) for n in (2, 31, 100 if kind == "gpt2" else 900, 17)]
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=8)
    graphs = llm.executor.runner.prompts
    assert graphs is not None
    for _ in range(3):
        replayed = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params)[0] for prompt in reversed(prompts)][::-1]
    assert {tokens for tokens, _ in graphs.captured} >= {32, 64}
    ahead = llm.generate(prompts, params.replace(logprobs=None))
    assert [o.token_ids for o in ahead] == [o.token_ids for o in replayed]
    llm.executor.runner.prompts = None
    eager = llm.generate(prompts, params)
    for outputs in (replayed, alone):
        for one, other in zip(outputs, eager, strict=True):
            a, b = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
            shared = [token for token in a if token in b]
            assert len(shared) >= 6
            assert torch.allclose(
                torch.tensor([a[t] for t in shared]), torch.tensor([b[t] for t in shared]), atol=0.02
            )


LENGTHS = (9, 70, 1, 130, 33, 2, 64, 65, 200, 17, 31)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("kind", "quant"),
    [
        *product(("llama", "qwen3", "gemma2", "gemma3"), ("none", "w4a16", "w8a8")),
        *(("llama", "w4a8"), ("qwen3", "w4a8")),  # Gemma's hidden states cannot be rotated
        *(("llama", "w8a8-fp8"), ("gemma3", "w8a8-fp8")),
    ],
)
def test_decodes_with_prompts_are_eager(
    tmp_path: Path, kind: str, quant: str, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph gives bit for bit what the same padded step gives eagerly, and the step without padding as near
    as other tiles sum. Where activations are rounded to 8 bits, values near a tie fall either way: there both
    are equally far from the same model in fp32.
    """
    save_model(tiny_config(kind, max_position_embeddings=512), tmp_path, seed=3)
    options: dict[str, Any] = {
        "quant": quant, "max_batch_size": 16,
        "runtime": RuntimeConfig(prefix_reuse=False, token_budget=64, kv_dtype=kv_dtype),
    }  # fmt: skip
    llm = LLM(tmp_path, device="cuda", compute_dtype="fp16", **options)
    llm.executor.run_ahead = False
    runner, seen = llm.executor.runner, set()
    rows: list[tuple[Request, int, torch.Tensor, torch.Tensor]] = []
    run, prompts = runner.run, runner.prompts
    assert prompts is not None

    def all_ways(step: ScheduledBatch) -> torch.Tensor:
        if step.layout.num_single == len(step.requests):
            return run(step)
        runner.prompts = None
        eager = run(step).clone()
        runner.prompts = prompts
        prompts._logits.fill_(math.nan)
        replayed = run(step).clone()
        bucket = prompts.bucket_of(step.layout.num_tokens, len(step.requests))
        buffer = prompts._padded[bucket].buffer
        batch = buffer.padded_batch(bucket[0], prompts.max_seq_len)
        ids = take_tokens(batch.input_ids, buffer.feed_rows, prompts.feed.table)
        padded = runner.forward(replace(batch, input_ids=ids))[: len(eager)]
        assert torch.equal(replayed, padded)
        if quant in ("none", "w4a16"):
            torch.testing.assert_close(replayed, eager, rtol=0, atol=0.03)
        samples = (item for item in step.requests if item.samples)
        rows.extend(
            (item.request, item.start + item.count, *pair)
            for item, *pair in zip(samples, eager.cpu(), replayed.cpu(), strict=True)
        )
        seen.add((step.layout.num_single > 0, bucket[1]))
        return eager

    monkeypatch.setattr(runner, "run", torch.inference_mode()(all_ways))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    llm.generate([random_ids(n, seed=n) for n in LENGTHS], params)
    assert seen >= {(True, 8), (True, 64)}
    if quant in ("w8a8", "w4a8", "w8a8-fp8"):
        exact = LLM(tmp_path, device="cuda", compute_dtype="fp32", **options)
        wanted = torch.stack([exact.logits([*request.tokens(0, end)])[-1] for request, end, _, _ in rows])
        eager, replayed = (torch.stack(way).float() for way in list(zip(*rows, strict=True))[2:])
        far, as_far = (float((way - wanted).square().mean().sqrt()) for way in (replayed, eager))
        print(
            f"from fp32: {far:.4f} replayed, {as_far:.4f} eager; {(replayed - eager).abs().max():.4f} apart"
        )
        assert 0 < far <= 1.1 * as_far


@pytest.mark.gpu
def test_tokens_flow_from_graph_to_graph(tmp_path: Path) -> None:
    """Requests that begin while others decode get the same tokens whether each is read before the next step
    or fed on the device.
    """
    save_model(tiny_config("llama", max_position_embeddings=512), tmp_path, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, token_budget=64)
    llm = LLM(tmp_path, device="cuda", compute_dtype="fp32", max_batch_size=16, runtime=runtime)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    ahead = llm.generate(prompts, params)
    llm.executor.run_ahead = False
    one_by_one = llm.generate(prompts, params)
    assert [o.token_ids for o in ahead] == [o.token_ids for o in one_by_one]
    assert llm.executor.runner.prompts is not None
    assert {requests for _, requests in llm.executor.runner.prompts.captured} >= {8, 64}


def test_each_size_is_captured_in_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []
    launched: list[list[object]] = []
    decodes, prompts = DecodeGraphs.__new__(DecodeGraphs), PromptGraphs.__new__(PromptGraphs)
    decodes.buckets, prompts.buckets = batch_buckets(4), request_buckets(64)
    monkeypatch.setattr(prompts, "capture", captured.append)
    monkeypatch.setattr(
        decodes, "warm_up", lambda size, kinds: captured.extend((size, kind) for kind in kinds)
    )
    monkeypatch.setattr(decodes, "launch_all", lambda sizes, kinds: launched.append([*sizes, *kinds]))
    monkeypatch.setattr(prompts, "launch_all", lambda *most: launched.append([*most]))
    layered = SimpleNamespace(
        warm_up=lambda: captured.append("layers"), launch_all=lambda: launched.append(["layers"])
    )
    runner: Any = Runner.__new__(Runner)
    vars(runner).update(graphs=decodes, prompts=prompts, layered=layered, most_tokens=70)
    runner.warm_up([1, 3], ["greedy", "filtered"])
    decoding = [(size, kind) for size in (1, 3) for kind in ("greedy", "filtered")]
    prompted = [(tokens, most) for tokens in (16, 32, 64, 128) for most in (1, 8)]
    assert captured == [*decoding, *prompted, "layers"]
    assert launched == [[1, 3, "greedy", "filtered"], [3, 70], ["layers"]]


@pytest.mark.parametrize("count", range(1, len(DRAW_KINDS) + 1))
def test_kinds_share_a_capture_of_the_model(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first, whose steps are the most; and where only one is left it has a graph of its own."""
    calls: list[object] = []
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.buckets, graphs._captured = batch_buckets(4), {}

    def capture(bucket: int, kind: Any) -> None:
        if (bucket, kind) not in graphs._captured:
            calls.append(kind)
            graphs._captured[bucket, kind] = SimpleNamespace()  # type: ignore[assignment]

    def share(bucket: int, kinds: list[Any]) -> None:
        calls.append(kinds)
        graphs._captured |= {(bucket, kind): SimpleNamespace() for kind in kinds}  # type: ignore[misc]

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_capture_sharing", share)
    kinds = [KINDS[kind] for kind in DRAW_KINDS[:count]]
    for _ in range(2):
        graphs.warm_up(3, DRAW_KINDS[:count])
        assert calls == [kinds[0], *([kinds[1:]] if count > 2 else kinds[1:])]
    assert graphs._captured.keys() == {(4, kind) for kind in kinds}


def test_unknown_kinds_are_named(folders: dict[str, Path]) -> None:
    llm = LLM(folders["llama"], "cpu", max_batch_size=2)
    llm.warm_up([1], kinds=["greedy"])
    llm.warm_up()
    with pytest.raises(RequestError, match=r"unknown kind of sampling.*greedy, unfiltered, filtered.*kinds"):
        llm.warm_up([1], kinds=["greedy", "beams"])


@pytest.mark.gpu
def test_no_kind_of_sampling_waits_for_a_capture_or_a_kernel(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folders["llama"], "cuda", compute_dtype="fp16", max_batch_size=4, max_seq_len=64)
    graphs = llm.executor.runner.graphs
    assert graphs is not None
    llm.warm_up([1], kinds=["greedy"])
    assert {kind for _, kind in graphs._captured} == {KINDS["greedy"]}
    llm.warm_up()
    captured = {(bucket, KINDS[kind]) for bucket in (1, 2, 4) for kind in DRAW_KINDS}
    assert set(graphs._captured) == captured
    built: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **reported: built.append(reported["repr"])
    )
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert llm.executor.runner.feed.counts.num_held == 0, "a capture takes no slot"
    before = llm.executor.runner.feed.counts.table
    assert not before.any(), "padding is counted nowhere"
    changes: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"repetition_penalty": 1.05},
        {"min_new_tokens": 2}, {"logprobs": 5}, {"logit_bias": {3: 1.0}},
        {"temperature": 0.7, "frequency_penalty": 1.0, "logprobs": 0},
    ]  # fmt: skip
    for change in changes:
        with watch(llm) as steps:
            llm.generate([[5, 6], [7]], [params, params.replace(**change)])
        assert steps.ahead == len(steps.steps), change
    masks = llm.executor.runner.feed.masks.table.data_ptr()
    vocab = llm.engine.manifest.model.vocab_size
    for change in ({}, {"temperature": 1.0, "logprobs": 2}):
        with watch(llm) as steps:
            llm.executor.add("free", [5, 6], params)
            llm.executor.add("held", [7], params.replace(**change), matcher=FakeMatcher(vocab, 1))
            while llm.executor.has_work:
                llm.executor.step()
        assert steps.ahead == len(steps.steps) > 4, change
    assert not built, "a kernel is built while others wait"
    assert set(graphs._captured) == captured
    assert llm.executor.runner.feed.counts.table.data_ptr() == before.data_ptr(), "graphs hold its address"
    assert llm.executor.runner.feed.masks.table.data_ptr() == masks


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["none", "w4a16", "w8a8"])
def test_a_warm_up_names_its_kernels_ahead(quant: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """In a process and a folder of its own, since each keeps what it has built."""
    code = f"""
from triton import knobs
from ingot import LLM
from ingot.kernels import built_ahead
handed_over, alone = [], []
usual = built_ahead.build_side_by_side
def build(kernels):
    handed_over.extend(kernels)
    usual(kernels)
built_ahead.build_side_by_side = build
knobs.compilation.listener = lambda **seen: seen["cache_hit"] or alone.append(seen["src"].name)
llm = LLM({str(folders["llama"])!r}, "cuda", quant={quant!r}, max_batch_size=4, max_seq_len=64)
llm.executor.runner.warm_up(range(1, 5), ["greedy", "filtered", "logprobs"])
print(len(handed_over), alone)
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, _, alone = done.stdout.splitlines()[-1].partition(" ")
    assert (int(count) > 20, alone) == (True, "[]"), done.stdout


@pytest.mark.gpu
def test_a_neighbour_s_grammar_changes_no_bit(folders: dict[str, Path]) -> None:
    """In graphs of one kind and bucket, which three rows take as well as four; and the plain order gives the
    same.
    """
    llm = LLM(folders["llama"], "cuda", compute_dtype="fp16", max_batch_size=4, max_seq_len=64)
    executor, vocab = llm.executor, llm.engine.manifest.model.vocab_size
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=0.8, top_p=0.9, logprobs=5)
    found = []
    for matcher, ahead in ((None, True), (FakeMatcher(vocab, 1), True), (FakeMatcher(vocab, 1), False)):
        executor.run_ahead = ahead
        for i in range(4):
            executor.add(f"r{i}", [5, 6 + i], params.replace(seed=i), matcher=matcher if i == 3 else None)
        news: dict[str, list[Any]] = {f"r{i}": [] for i in range(4)}
        while executor.has_work:
            for one in executor.step():
                news[one.request_id] += zip(one.token_ids, one.logprobs, strict=True)
        check_idle(llm)
        found.append(news)
    plain, beside, _ = found
    assert all(plain[f"r{i}"] == beside[f"r{i}"] for i in range(3))
    ids = [[token for token, _ in news["r3"]] for news in found]
    assert ids[1] == ids[2] != ids[0]
    assert len(ids[1]) == 9


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([{}], "greedy"),
        ([{}, {"temperature": 1.0, "min_p": 0.1}], "unfiltered"),
        ([{"temperature": 1.0, "top_p": 0.5}, {}], "filtered"),
        ([{"temperature": 1.0, "top_p": 0.5}, {"slot": 3}], "penalized"),
        ([{"temperature": 1.0, "top_p": 0.5}, {"mask": 2}, {"slot": 3}], "masked"),
        ([{"logprobs": True}, {}], "greedy_logprobs"),
        ([{"logprobs": True}, {"slot": 3}, {"mask": 0}], "logprobs"),
    ],
)
def test_the_least_general_kind_that_does_all_rows(values: list[dict[str, Any]], kind: str) -> None:
    draws = [RowSampling(**one) for one in values]
    runner = Runner.__new__(Runner)
    runner.graphs = DecodeGraphs.__new__(DecodeGraphs)
    assert runner._way(draws) == KINDS[kind], "a step beside prompts asks for no kernels of its own"
    runner.graphs = None
    assert runner._way(draws) is draws
    assert sampling_kind(draws) == KINDS[kind]
    flags, wanted = (SamplingTensors.from_rows(rows, "cpu") for rows in (KINDS[kind], draws))
    for name in ("any_rules", "any_masks", "any_logprobs", "any_top_p"):
        assert getattr(flags, name) >= getattr(wanted, name)
    assert flags.all_greedy <= wanted.all_greedy


@pytest.mark.gpu
def test_kinds_that_share_a_capture_draw_as_graphs_of_their_own(folders: dict[str, Path]) -> None:
    """A warm-up shares captures of the model, requests capture whole steps."""
    found = []
    for warm in (True, False):
        llm = LLM(folders["llama"], "cuda", compute_dtype="fp16", max_batch_size=4, max_seq_len=64)
        if warm:
            llm.warm_up()
        params = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=3)
        changes: list[dict[str, Any]] = [
            {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "repetition_penalty": 1.2}, {"temperature": 0.0, "logprobs": 3},
        ]  # fmt: skip
        for change in changes:
            outputs = llm.generate([[5, 6], [7], [8, 9, 10]], params.replace(**change))
            found.append([(one.token_ids, str(one.logprobs)) for one in outputs])
    assert found[: len(found) // 2] == found[len(found) // 2 :]
