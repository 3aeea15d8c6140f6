"""What is wrong in an engine is named at the stage where it is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.layers.forward_batch import ForwardBatch
from ingot.measure.align.align_report import report_html, report_json
from ingot.measure.align.align_session import Report, align
from ingot.measure.align.stage_verdict import SERVED
from ingot.runtime.step.chosen_products import Forward
from tests.measure.align.conftest import Spoil, at
from tests.tiny_models import edit_config, random_ids

IDS = random_ids(12)
DOWN = "model.layers.1.mlp.down_proj.weight"
Aligned = Callable[..., Report]


@pytest.fixture
def aligned(spoil: Spoil, originals: dict[str, Path]) -> Aligned:
    """aligned("llama", tensor, change): an engine with one tensor changed beside its original."""

    def run(
        kind: str, tensor: str, change: Callable[..., Any], prompt: Any = IDS, steps: int = 1, **options: Any
    ) -> Report:
        spoilt = spoil(kind, at(tensor, change))
        return align(spoilt, originals[kind], [prompt], steps=steps, device="cpu", **options)

    return run


@pytest.mark.usefixtures("unexplained")
@pytest.mark.stays("0-fp32", "1-bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layer", [0, 1])
def test_mlp_weight(layer: int, dtype: str, aligned: Aligned) -> None:
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    rows = torch.arange(32)[:, None]
    report = aligned("llama", name, lambda w: torch.where(rows == 3, -w, w), dtype=dtype)
    assert not report.aligned
    assert report.first_stage == f"layers.{layer}.mlp"
    assert report.first is not None
    assert report.first.alone
    assert report.first.row.step == 0
    found = report.first.row.alone
    assert found is not None
    assert found.channel == 3
    assert report.first.expected_value == pytest.approx(-report.first.got_value, rel=0.05)


@pytest.mark.usefixtures("unexplained")
def test_only_the_wrong_module_is_wrong_alone(aligned: Aligned) -> None:
    report = aligned("qwen3", "model.layers.0.self_attn.o_proj.weight", lambda w: 1.5 * w, steps=2)
    assert {row.stage for row in report.rows if row.is_wrong_alone} == {"layers.0.attention"}
    assert "layers.1.output" in {row.stage for row in report.rows if row.is_bad}


@pytest.mark.usefixtures("unexplained")
def test_a_small_fault_that_only_grows_into_sight(aligned: Aligned) -> None:
    """One weight off by a little: beyond the module's own noise, though not beyond what has gathered."""
    assert aligned("llama", DOWN, lambda w: 1.02 * w, dtype="fp16").first_stage == "layers.1.mlp"


@pytest.mark.usefixtures("unexplained")
@pytest.mark.stays(
    "llama-model.embed_tokens.weight-embedding",
    "qwen2-model.layers.1.self_attn.k_proj.bias-layers.1.attention",
    "gpt2-transformer.h.1.ln_2.bias-layers.1.post_norm",
    "gpt2-transformer.h.0.mlp.c_fc.bias-layers.0.mlp",
    "llama-lm_head.weight-logits",
)
@pytest.mark.parametrize(
    ("kind", "tensor", "stage"),
    [
        ("llama", "model.embed_tokens.weight", "embedding"),
        ("qwen2", "model.layers.1.input_layernorm.weight", "layers.1.input_norm"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias", "layers.1.attention"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "layers.0.attention"),
        ("gpt2", "transformer.wpe.weight", "embedding"),
        ("gpt2", "transformer.h.1.ln_2.bias", "layers.1.post_norm"),
        ("gpt2", "transformer.h.0.mlp.c_fc.bias", "layers.0.mlp"),
        ("llama", "model.norm.weight", "final_norm"),
        ("llama", "lm_head.weight", "logits"),
    ],
)
def test_every_kind_of_stage(kind: str, tensor: str, stage: str, aligned: Aligned) -> None:
    assert aligned(kind, tensor, lambda w: w.roll(1, 0)).first_stage == stage


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, "layers.0.attention"),
        ({"rms_norm_eps": 1e-3}, "layers.0.input_norm"),
    ],
)
def test_config(changes: dict[str, Any], stage: str, originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["llama"], tmp_path / "other"))
    edit_config(folder, **changes)
    assert align(folder, originals["llama"], [IDS], steps=1, device="cpu").first_stage == stage


@pytest.mark.parametrize(("kind", "layer"), [("sliding_attention", 0), ("full_attention", 1)])
def test_the_base_of_one_kind_of_layers(
    kind: str, layer: int, originals: dict[str, Path], tmp_path: Path
) -> None:
    """Named with that kind's own base, at its first layer."""
    folder = Path(shutil.copytree(originals["gemma3"], tmp_path / "other"))
    ropes = json.loads((folder / "config.json").read_text())["rope_parameters"]
    wanted = ropes[kind] | {"rope_theta": 10000.0}
    edit_config(folder, rope_parameters=ropes | {kind: wanted})
    prompt = random_ids(40)
    report = align(originals["gemma3"], folder, [prompt], steps=1, device="cpu")
    assert report.first_stage == f"layers.{layer}.attention"
    named = json.dumps(report_json(report), default=str)
    assert f"the RoPE base is {ropes[kind]['rope_theta']:g}, the original's is 10000" in named


@pytest.mark.usefixtures("unexplained")
def test_own_path_finds_weights(aligned: Aligned) -> None:
    name = "transformer.h.1.attn.c_attn.bias"
    report = aligned("qwen", name, lambda bias: bias + (torch.arange(len(bias)) < 4), "hello")
    assert report.first_stage == "layers.1.attention"


def test_a_kernel_that_only_serving_uses(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Forward.__call__

    def forward(self: Forward, batch: ForwardBatch) -> torch.Tensor:
        logits = whole(self, batch)
        decodes = batch.max_query_len == 1 and not self.by_module
        return logits.roll(1, -1) if decodes else logits

    monkeypatch.setattr(Forward, "__call__", forward)
    report = align(originals["llama"], originals["llama"], [IDS], steps=2, device="cpu")
    assert report.first_stage == SERVED
    assert report.first is not None
    assert report.first.row.step == 1
    assert [row.step for row in report.bad_greedy] == [1, 2]
    assert "only requests use" in report_json(report)["first"]["why"]


def test_not_a_number(aligned: Aligned) -> None:
    rows = torch.arange(48)[:, None]
    huge = aligned("llama", "model.layers.1.mlp.up_proj.weight", lambda w: w.masked_fill(rows == 0, 3e38))
    assert huge.first_stage == "layers.1.mlp"


def test_reports(aligned: Aligned) -> None:
    report = aligned("llama", DOWN, lambda w: 1.5 * w)
    value = report_json(report)
    assert value["aligned"] is False
    assert value["first_stage"] == "layers.1.mlp"
    assert value["first"]["expected"]["shape"] == (12, 32)
    page = report_html(report)
    assert "diverged at layers.1.mlp, step 0" in page
    assert 'src="' not in page
    assert "http" not in page
