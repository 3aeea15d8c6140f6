"""Each kernel case's two sides do the same work: their results agree, on the CPU's twins and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.layers.decoder import DecoderLayer
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.kernel_bench import kernel_cases
from ingot.measure.bench.kernel_bench.kernel_case import REPLAYS, Inputs, KernelCase
from ingot.measure.bench.kernel_bench.kernel_cases import (
    BLOCK,
    KernelSetting,
    all_cases,
    contiguous,
    turns_at,
)
from ingot.measure.bench.kernel_bench.kernel_layer import LayerStack
from ingot.measure.bench.kernel_bench.kernel_times import Kernels, Shape, measure_kernels
from ingot.measure.bench.kernel_bench.torch_layer import torch_layer

LLAMA = DecoderConfig(
    "llama", 211, 64, 96, 2, 4, 2, 16, 4096, rope=RopeConfig(16), qkv_bias=True, norm_eps=1e-5
)
GPT2 = DecoderConfig(
    "gpt2", 211, 64, 96, 2, 4, 4, 16, 4096, norm="layer_norm", mlp="gelu_tanh", qkv_bias=True,
    output_bias=False, mlp_bias=False,
)  # fmt: skip
WINDOW = replace(LLAMA, sliding_window=40)
QWEN3 = replace(LLAMA, qk_norm=True)
QWEN1 = replace(LLAMA, num_kv_heads=4, logn_length=16)
GELU = replace(GPT2, mlp="gelu")
RELU = replace(GPT2, mlp="relu")
PLACES = [
    pytest.param("cpu", torch.float32, 2e-5, id="cpu"),
    pytest.param("cuda", torch.float16, 2e-2, id="cuda", marks=pytest.mark.gpu),
]


def setting(config: DecoderConfig, device: str, dtype: torch.dtype) -> KernelSetting:
    torch.manual_seed(0)
    inputs = Inputs(torch.device(device), dtype, footprint=1 << 14)
    return KernelSetting(config, KernelPlan(), inputs, (1, 3), 100, 70, 128, folded=config.norm == "rms_norm")


def tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def assert_same(case: KernelCase, tolerance: float) -> None:
    for i in (0, case.calls - 1):
        ours, theirs = tensors(case.ours(i)), tensors(case.torch(i))
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            if case.effort.op == "prefill_attention":
                b = b[0].transpose(0, 1)
            apart = (a.float().flatten() - b.float().flatten()).norm() / b.float().norm()
            assert apart < tolerance, case.effort


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("config", [LLAMA, GPT2, WINDOW], ids=["llama", "gpt2", "window"])
def test_both_sides_of_every_case_agree(
    config: DecoderConfig,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_cases, "NORM_ROWS", (1, 5))
    monkeypatch.setattr(kernel_cases, "PREFILL_TOKENS", 130)
    ops = set()
    with torch.inference_mode():
        for case in all_cases(setting(config, device, dtype)):
            assert case.effort.num_bytes > 0
            ops.add(case.effort.op.split()[0])
            assert_same(case, tolerance)
    products = {"small_qkv", "small_linear", "small_linear_parts", "small_gate_up", "silu_mul"}
    folded = products if config is not GPT2 else set()
    assert ops == {config.norm, "paged_attention", "prefill_attention"} | folded


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize(
    "config",
    [LLAMA, GPT2, QWEN3, QWEN1, GELU, RELU],
    ids=["llama", "gpt2", "head norms", "log-n", "exact gelu", "relu"],
)
def test_the_layer_of_both_sides_agrees(
    config: DecoderConfig, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    stack = LayerStack(setting(config, device, dtype))
    model = stack._model
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if name.endswith("up_proj.weight"):
                weight.mul_(16)  # to values where activation functions differ
        batch, forward = stack._step(model, 3, 2 * stack.depth)
        tables = batch.block_tables
        pages = [
            [contiguous(t[None], tables, 100)[0].clone() for t in (c.keys, c.values)] for c in forward.caches
        ]
        ours = forward(batch).float()
        hidden = model.embed(batch.input_ids, batch.positions)
        turns = None if model.rotary is None else turns_at(model.rotary.table, batch.positions, dtype)
        for layer, (keys, values) in zip(model.layers, pages, strict=True):
            assert isinstance(layer, DecoderLayer)
            hidden = torch_layer(config, layer, hidden, keys, values, batch.positions, turns)
        theirs = model.logits(model.norm(hidden)[0]).float()
    assert torch.isfinite(ours).all()
    assert (ours - theirs).norm() / theirs.norm() < tolerance


def test_work_is_that_of_the_definitions() -> None:
    s = setting(LLAMA, "cpu", torch.float32)
    norm = kernel_cases.norm_case(s, 3, add=True, cached=False).effort
    assert norm.num_bytes == (4 * 3 + 1) * 64 * 4  # two in, two out, and the weight
    assert kernel_cases.norm_case(s, 3, add=False, cached=True).effort.num_bytes == (2 * 3 + 1) * 64 * 4
    assert kernel_cases.decode_attention_case(s, 3).effort.num_bytes == 4 * (
        2 * 3 * 100 * 2 * 16 + 2 * 3 * 4 * 16
    )
    windowed = kernel_cases.decode_attention_case(setting(WINDOW, "cpu", torch.float32), 3).effort
    assert windowed.num_bytes == 4 * (2 * 3 * 40 * 2 * 16 + 2 * 3 * 4 * 16)
    prefill = kernel_cases.prefill_attention_case(s, 70).effort
    assert prefill.flops == 4 * (70 * 71 // 2) * 64
    assert prefill.compute_bound
    qkv = next(kernel_cases.product_cases(s, 3)).effort
    assert qkv.flops == 2 * 3 * 128 * 64
    assert LayerStack(s).num_weights == 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert BLOCK == 64


@pytest.mark.gpu
def test_every_case_is_timed_in_a_graph() -> None:
    device = torch.device("cuda")
    ceiling = Ceiling(4000.0, 600.0, "fp16", 1, 1)
    shape = Shape(LLAMA, KernelPlan(), torch.float16, 128, folded=True)
    entries = measure_kernels(shape, Kernels((1, 8), 100, 70), device, ceiling)
    ops = {entry["op"].split()[0] for entry in entries}
    assert ops >= {"rms_norm", "small_qkv", "paged_attention", "prefill_attention", "silu_mul", "decoder"}
    assert all(entry["us"]["least"] > 0 or entry["op"] == "decoder layer" for entry in entries)
    assert all(len(entry["raw_us"]) == len(entry["raw_torch_us"]) == REPLAYS for entry in entries)
