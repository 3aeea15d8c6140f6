"""A step of decodes and chunks: each row's attention equals its attention alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers import attention as layer
from ingot.layers.attention import Attention
from ingot.layers.build_context import BuildContext
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.step_layout import StepLayout
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Scheduler
from tests.e2e.watch import watch
from tests.kernels.numerics import normal
from tests.kernels.paged_case import PagedCase, paged_case
from tests.padded_step import padded_logits
from tests.tiny_models import random_ids, save_model, tiny_config
from tests.unit.test_scheduler import request, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [70, 9, 0, 33, 130, 40]  # three decodes, one of them padding; two chunks on cached keys; a prompt
QUERIES = [1, 1, 1, 23, 64, 40]
DECODES = 3


def small_attention(device: str, dtype: torch.dtype, window: int) -> Attention:
    config = DecoderConfig(
        "llama", 97, 64, 64, 1, num_heads=4, num_kv_heads=2, head_dim=16, max_positions=256,
        sliding_window=window,
    )  # fmt: skip
    with torch.device(device):
        return Attention(config, BuildContext(QuantConfig(), KernelPlan(), dtype), window)


def step_of(case: PagedCase, first: int, last: int, decodes: int) -> ForwardBatch:
    """The requests ``first`` to ``last`` of the case as a step."""
    counts, lens = QUERIES[first:last], LENGTHS[first:last]
    starts = [length - count for length, count in zip(lens, counts, strict=True)]
    layout = StepLayout.of(starts, counts, case.block_tables[first:last].tolist(), 16)
    batch = ForwardBatch.of(layout, case.seq_lens.device, max_seq_len=256)
    return replace(batch, num_decodes=decodes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 21])
def test_rows_do_not_see_their_company(device: str, dtype: torch.dtype, window: int) -> None:
    case = paged_case(LENGTHS, kv_heads=2, head_dim=16, block_size=16, dtype=dtype, device=device)
    attention, cache = small_attention(device, dtype, window), LayerCache(case.key_cache, case.value_cache)
    query = normal(sum(QUERIES), 4, 16, dtype=dtype, device=device)
    mixed = attention.attend(query, step_of(case, 0, 6, DECODES), cache)
    decodes = attention.attend(query[:DECODES], step_of(case, 0, DECODES, 0), cache)
    assert torch.equal(mixed[:DECODES], decodes)
    assert (mixed[2] == 0).all(), "a padding row is zeros"
    chunks = attention.attend(query[DECODES:], step_of(case, DECODES, 6, 0), cache)
    assert torch.equal(mixed[DECODES:], chunks)
    unsplit = attention.attend(query, step_of(case, 0, 6, 0), cache)
    torch.testing.assert_close(mixed, unsplit, rtol=2e-3, atol=1e-3)


def test_single_tokens_stand_first() -> None:
    s = Scheduler(BlockManager(64, 4, True), 8, 16)
    s.add(request("decoding", 5))
    run(s)
    s.add(request("long", 40, first=100))
    s.add(request("one", 1, first=300))
    step = run(s)
    assert [(i.request.request_id, i.count) for i in step.requests] == [("decoding", 1), ("long", 15)]
    assert step.layout.num_single == 1
    for _ in range(2):
        step = run(s)
    assert [(i.request.request_id, i.count) for i in step.requests] == [
        ("decoding", 1),
        ("one", 1),
        ("long", 10),
    ]
    assert step.layout.num_single == 2
    assert run(s).layout.num_single == 3


def test_a_mixed_step_runs_both_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", runtime=RuntimeConfig(prefix_reuse=False))
    seen: list[tuple[int, int]] = []
    original = layer.paged_attention

    def counted(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append((query.shape[0], options["output"].out.shape[0]))
        return original(query, *rest, **options)

    monkeypatch.setattr(layer, "paged_attention", counted)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [random_ids(9, seed=1), random_ids(100, seed=2)]
    alone = [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
    llm.executor.scheduler.token_budget = 32
    seen.clear()
    with watch(llm) as steps:
        together = llm.generate(prompts, params)
    assert [output.token_ids for output in together] == alone
    counts = [[share.count for share in step] for step in steps.steps]
    mixed = [step for step in counts if 1 in step and max(step) > 1]
    assert mixed
    assert all(step[0] == 1 for step in mixed)
    assert (1, 1) in seen


@pytest.mark.parametrize(
    ("kind", "quant"),
    [("llama", "none"), ("gemma2", "none"), ("gemma3", "none"), ("qwen3", "w8a8"), ("gpt2", "w8a16")],
)
def test_what_a_graph_is_captured_over_gives_the_same(
    kind: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static buffers that mark decoding rows for the device; padding of tokens and requests."""
    save_model(tiny_config(kind), tmp_path, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, token_budget=40)
    llm = LLM(tmp_path, device="cpu", quant=quant, runtime=runtime)
    runner, kinds, run = llm.executor.runner, set(), llm.executor.runner.run

    def both(step: ScheduledBatch) -> torch.Tensor:
        logits = run(step)
        kinds.add((step.layout.num_single > 0, step.layout.num_single < len(step.requests)))
        torch.testing.assert_close(padded_logits(llm, step), logits, rtol=1e-5, atol=1e-5)
        return logits

    monkeypatch.setattr(runner, "run", torch.inference_mode()(both))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    llm.generate([random_ids(n, seed=n) for n in (9, 70, 3, 33, 1)], params)
    assert kinds == {(True, True), (True, False), (False, True)}
