"""A clean engine of every architecture is aligned, and every stage is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import build
from ingot.measure.align import align_session as session
from ingot.measure.align.align_session import Report, align
from ingot.measure.align.stage_verdict import SERVED
from ingot.measure.align.stages.stage_names import stage_names
from tests.tiny_models import random_ids, save_model, tiny_config

CLASSES = ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "opt")


def check(report: Report, steps: int, layers: int = 2) -> None:
    worst = max(report.rows, key=lambda row: row.difference.relative / row.limit)
    assert report.aligned, (report.first_stage, worst)
    assert report.first_stage is None
    assert [r.stage for r in report.rows] == stage_names(layers) * (steps + 1) + [SERVED] * (steps + 1)
    assert all((row.alone is None) == (row.stage == SERVED) for row in report.rows)
    assert len(report.greedy) == steps + 1


@pytest.mark.stays(
    "gpt2-fp32",
    "llama-fp32",
    "llama-bf16",
    "qwen2-fp32",
    "qwen3-fp32",
    "gemma2-fp32",
    "gemma3-fp32",
    "opt-fp32",
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", CLASSES)
def test_huggingface_class(kind: str, dtype: str, originals: dict[str, Path]) -> None:
    report = align(originals[kind], originals[kind], [random_ids(12)], steps=2, device="cpu", dtype=dtype)
    assert report.reference.startswith("Hugging Face's ")
    check(report, steps=2, layers={"gemma2": 4, "gemma3": 5}.get(kind, 2))
    if dtype != "fp32":
        assert any(row.difference.relative > 1e-4 for row in report.rows), "it really ran in 16 bits"


@pytest.mark.stays("gpt2-fp32", "llama-fp16")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_own_path(kind: str, dtype: str, originals: dict[str, Path]) -> None:
    options = {"steps": 2, "device": "cpu", "dtype": dtype, "original": "ingot"}
    report = align(originals[kind], originals[kind], [random_ids(12)], **options)
    assert report.reference == "Ingot's checking decoder, fp32"
    check(report, steps=2)
    floors = [row.floor for row in report.rows if row.stage != "embedding"]
    assert min(floors) > 0, "the noise is measured, not assumed"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_qwen_v1(dtype: str, originals: dict[str, Path]) -> None:
    report = align(originals["qwen"], originals["qwen"], ["hello"], steps=2, device="cpu", dtype=dtype)
    assert report.reference == "Ingot's checking decoder, fp32"
    check(report, steps=2)
    assert [c.stage for c in report.cases[0].checks] == ["token ids"]


@pytest.mark.stays("qwen_v1_0_bin")
@pytest.mark.parametrize("name", ["qwen_v1_1_safetensors", "qwen_v1_0_bin"])
def test_qwen_v1_beyond_its_length(name: str, golden: Path) -> None:
    folder = golden / name / "hf"
    report = align(folder, folder, [random_ids(150, vocab_size=60)], steps=2, device="cpu")
    assert report.aligned


def test_engine_in_16_bits_on_a_cpu(originals: dict[str, Path], tmp_path: Path) -> None:
    engine = build(originals["llama"], tmp_path / "engine", dtype="bf16", device="cpu", max_batch_size=2)
    report = align(engine, originals["llama"], [random_ids(12)], steps=2, device="cpu")
    check(report, steps=2)
    assert max(row.limit for row in report.rows) < 1e-4, "weights that are stored rounded are no noise"


def test_an_engine_with_a_narrow_cache_is_compared_without_it(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    """Rounded keys and values would be differences of every stage behind them."""
    engine = build(originals["llama"], tmp_path / "engine", device="cpu", kv_dtype="int8", proof=False)
    report = align(engine, originals["llama"], [random_ids(12)], steps=1, device="cpu")
    check(report, steps=1)
    assert max(row.difference.relative for row in report.rows) < 1e-4


def test_a_prompt_of_several_chunks(tmp_path: Path) -> None:
    save_model(tiny_config("llama", max_position_embeddings=512), tmp_path / "long", seed=1)
    report = align(tmp_path / "long", tmp_path / "long", [random_ids(300)], steps=1, device="cpu")
    assert report.aligned


def test_served_logits_take_nothing_from_the_cache(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run module by module has cached would hide what a prompt's kernels get wrong when serving."""
    counts: list[int] = []

    class Counting(session.LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            run = self.executor.runner.run

            def counted(step: Any) -> torch.Tensor:
                counts.append(step.layout.num_tokens)
                return run(step)

            monkeypatch.setattr(self.executor.runner, "run", counted)

    monkeypatch.setattr(session, "LLM", Counting)
    assert align(originals["llama"], originals["llama"], [random_ids(100)], steps=1, device="cpu").aligned
    assert counts == [100, 1] * 2


def test_several_prompts(originals: dict[str, Path]) -> None:
    prompts = [random_ids(5, 1), random_ids(9, 2)]
    report = align(originals["llama"], originals["llama"], prompts, steps=1, device="cpu")
    assert report.aligned
    assert {row.case for row in report.rows} == {0, 1}


@pytest.mark.parametrize(("given", "steps"), [(0, 0), (1, 1), (None, session.DEFAULT_STEPS)])
def test_as_many_steps_as_asked(given: int | None, steps: int, originals: dict[str, Path]) -> None:
    """None is asked for, too."""
    report = align(
        originals["llama"], originals["llama"], [[5, 6]], steps=given, device="cpu", original="ingot"
    )
    assert report.steps == steps
    assert {row.step for row in report.rows} == {*range(steps + 1)}
    assert [row.step for row in report.greedy] == [*range(steps + 1)]


def test_fewer_layers(originals: dict[str, Path], tmp_path: Path) -> None:
    for layers in ("0:1", "1:2"):
        engine = tmp_path / layers.replace(":", "-")
        build(originals["qwen2"], engine, device="cpu", max_batch_size=2, layers=layers)
        report = align(engine, originals["qwen2"], [random_ids(8)], steps=1, device="cpu")
        assert report.aligned
        assert {row.stage for row in report.rows} == {*stage_names(1), SERVED}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", [*CLASSES, "qwen"])
def test_on_a_gpu(kind: str, dtype: str, originals: dict[str, Path]) -> None:
    prompts = [random_ids(12), random_ids(40)]
    report = align(originals[kind], originals[kind], prompts, steps=3, device="cuda", dtype=dtype)
    assert report.aligned
    assert SERVED in {row.stage for row in report.rows}
