"""Whole engines of w8a8-fp8 in blocks on a GPU: proven, aligned, and all ways of a step equally exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.quant.test_fp8_blocks import AS_STORED, write_blocks
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.gpu
# Inputs of 512 and 1024 columns, which the matrix library multiplies by in blocks; parts are whole blocks.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
PROMPTS = [random_ids(n, seed=n) for n in (1, 2, 5, 9, 17, 30, 64, 65, 100, 150, 200, 300)]
FEW = {"max_batch_size": 12}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_published_bytes_are_proven_and_aligned(dtype: str, tmp_path: Path) -> None:
    write_blocks(tmp_path / "c", **SIZES)
    folder = build(tmp_path / "c", tmp_path / "e", device="cuda", dtype=dtype, tune=False, **AS_STORED)
    found = verify(folder, "cuda", note=False, source=tmp_path / "c")
    assert found.verdict == "proven", found.failures
    prompts = [random_ids(40), random_ids(90, seed=2)]
    report = align(folder, tmp_path / "c", prompts, steps=3, device="cuda")
    assert report.aligned, report.first_stage


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_channels_are_proven_and_aligned(dtype: str, tmp_path: Path) -> None:
    save_model(tiny_config("qwen3", **SIZES), tmp_path / "c", seed=3)
    quant = QuantConfig("w8a8-fp8")
    folder = build(tmp_path / "c", tmp_path / "e", quant=quant, dtype=dtype, device="cuda", tune=False)
    assert verify(folder, "cuda", note=False).verdict == "proven"
    report = align(folder, tmp_path / "c", [random_ids(40), random_ids(90, seed=2)], steps=3, device="cuda")
    assert report.aligned, report.first_stage


def far(exact: LLM, llm: LLM, single: bool) -> float:
    """RMS of how far logarithms of chosen tokens are from those of the modules in fp32."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0)
    groups = [[prompt] for prompt in PROMPTS] if single else [PROMPTS]
    outputs = [output for group in groups for output in llm.generate(group, params)]
    off = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logits = exact.logits(prompt + output.token_ids[:-1])[len(prompt) - 1 :]
        wanted = logits.double().log_softmax(-1).cpu()
        for row, token, found in zip(wanted, output.token_ids, output.logprobs, strict=True):
            off.append(found.logprob - float(row[token]))
    return float(torch.tensor(off).square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_all_ways_of_a_step_are_as_exact(dtype: str, tmp_path: Path) -> None:
    """Fused and by module, in graphs and eagerly, batched and alone: where a value near a tie falls differs,
    so all are compared with the modules in fp32.
    """
    write_blocks(tmp_path / "c", **SIZES)
    folder = build(tmp_path / "c", tmp_path / "e", device="cuda", dtype=dtype, tune=False, **AS_STORED)
    modules = RuntimeConfig(cuda_graphs=False, fused_decode=False)
    exact = LLM(folder, device="cuda", compute_dtype="fp32", runtime=modules, **FEW)
    llms = {
        "modules": LLM(folder, device="cuda", runtime=modules, **FEW),
        "eager": LLM(folder, device="cuda", runtime=RuntimeConfig(cuda_graphs=False), **FEW),
        "graphs": LLM(folder, device="cuda", **FEW),
    }
    found = {
        f"{name}, {'alone' if single else 'batched'}": far(exact, llm, single)
        for name, llm in llms.items()
        for single in (True, False)
    }
    print(found)
    assert 0 < max(found.values()) <= 1.2 * found["modules, alone"]


def test_batch_invariant_steps_have_the_same_tokens(tmp_path: Path) -> None:
    write_blocks(tmp_path / "c", **SIZES)
    folder = build(tmp_path / "c", tmp_path / "e", device="cuda", dtype="bf16", tune=False, **AS_STORED)
    llm = LLM(folder, device="cuda", runtime=RuntimeConfig(batch_invariant=True), **FEW)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=0)
    batched = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, batched, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert alone.token_ids == output.token_ids
        assert alone.logprobs == output.logprobs
