"""Engines in w8a8 that a GPU calibrates, proves, aligns and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.layers.linear import linears
from ingot.llm.verify import verify
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.gpu
# of a size that the kernels read in whole tiles
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CONFIGS = {
    "dynamic": QuantConfig("w8a8"),
    "static": QuantConfig("w8a8", activations="static"),
    "smoothed": QuantConfig("w8a8", method="smoothquant"),
    "searched": QuantConfig("w8a8", method="smoothquant", alpha="search", activations="static"),
    "4 bits": QuantConfig("w4a8"),
    "4 bits, not rotated": QuantConfig("w4a8", 64, rotation=False),
    "4 bits by GPTQ": QuantConfig("w4a8", method="gptq"),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_proven_and_aligned(name: str, dtype: str, samples: Path, tmp_path: Path) -> None:
    save_model(tiny_config("llama", **SIZES), tmp_path / "c", seed=3)
    quant = CONFIGS[name]
    calib = samples if quant.calibrated else None
    folder = build(
        tmp_path / "c", tmp_path / "e", quant=quant, dtype=dtype, calib=calib, device="cuda", tune=False
    )
    found = verify(folder, "cuda", note=False)
    assert found.verdict == "proven", found.failures
    report = align(folder, tmp_path / "c", [random_ids(40), random_ids(90, seed=2)], steps=3, device="cuda")
    assert report.aligned, report.first_stage


@pytest.mark.parametrize("name", ["static", "smoothed"])
def test_it_finds_what_a_cpu_does(name: str, samples: Path, tmp_path: Path) -> None:
    save_model(tiny_config("llama", **SIZES), tmp_path / "c", seed=3)
    models = []
    for device in ("cuda", "cpu"):
        options = {"calib": samples, "device": device, "proof": False, "tune": False, "dtype": "bf16"}
        folder = build(tmp_path / "c", tmp_path / device, quant=CONFIGS[name], **options)  # type: ignore[arg-type]
        models.append(linears(LLM(folder, "cpu").engine.model))
    for layer, linear in models[0].items():
        own, other = (found[layer].dequantized(torch.float32) for found in models)
        assert float((own - other).norm() / other.norm()) < 1e-3, layer
        if "input_scale" in linear._parameters:
            assert float(linear.input_scale) == pytest.approx(float(models[1][layer].input_scale), rel=1e-4)
