"""``ingot diff`` of engines in fewer bits: what the layers' weights mean, not which tensors hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.engine_diff import compare_engines
from ingot.engine.weight_meaning import EngineWeights
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as it is, and in three schemes."""
    root = tmp_path_factory.mktemp("diff")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_model(tiny_config("llama", **shape), root / "hf", seed=1)
    schemes = {
        "dense": QuantConfig(),
        "w8a16": QuantConfig("w8a16"),
        "w4a16": QuantConfig("w4a16", group=32),
        "w4a8": QuantConfig("w4a8", group=64),
    }
    return {
        name: build(root / "hf", root / name, device="cpu", dtype="fp32", quant=quant, proof=False)
        for name, quant in schemes.items()
    }


def test_a_scheme_is_one_line_and_its_error_that_of_the_weights(engines: dict[str, Path]) -> None:
    shown = ingot("diff", engines["dense"], engines["w8a16"])
    assert shown.exit_code == 1
    (line,) = [line for line in shown.stdout.splitlines() if "dequantized" in line]
    reported = re.fullmatch(
        r"  8 layers: fp32 -> w8a16, dequantized error (.*)% on average, at most (.*)% \((.*)\)", line
    )
    assert reported is not None, line
    assert "only in" not in shown.stdout
    dense, narrow = (EngineWeights(engines[name]) for name in ("dense", "w8a16"))
    errors = {
        name: float((dense.read(f"{name}.weight") - narrow.read(f"{name}.weight")).norm())
        / float(dense.read(f"{name}.weight").norm())
        for name in narrow.quantized
    }
    assert float(reported[1]) / 100 == pytest.approx(sum(errors.values()) / len(errors), abs=6e-5)
    assert reported[3] == max(errors, key=lambda name: errors[name])
    assert 0 < errors[reported[3]] < 0.02


def test_all_lists_every_tensor(engines: dict[str, Path]) -> None:
    shown = ingot("diff", engines["dense"], engines["w8a16"], "--all").stdout
    assert shown.count("only in A (F32") == 8
    assert "8 layers: fp32 -> w8a16" in shown


def test_two_schemes_and_one_that_turns_all_weights(engines: dict[str, Path]) -> None:
    found = compare_engines(engines["w8a16"], engines["w4a16"])
    assert {(layer.left, layer.right) for layer in found.layers} == {("w8a16", "w4a16")}
    assert all(0.01 < (layer.relative or 0) < 0.3 for layer in found.layers)
    reported = json.loads(ingot("diff", engines["dense"], engines["w4a8"], "--json").stdout)
    assert reported["incomparable"] == "a rotation changes all weights"
    assert all(layer["relative"] is None for layer in reported["layers"])
    shown = ingot("diff", engines["dense"], engines["w4a8"]).stdout
    assert "8 layers: fp32 -> w4a8, weights not compared: a rotation changes all weights" in shown


def test_a_dequantized_weight_is_what_the_layer_computes_with(engines: dict[str, Path]) -> None:
    weights = EngineWeights(engines["w4a16"])
    names = list(weights.names())
    assert len(names) == len(set(names))
    assert {"embed_tokens.weight", "layers.0.mlp.down_proj.weight", "norm.weight"} <= set(names)
    assert weights.read("layers.0.mlp.down_proj.weight").shape == (64, 128)
    assert weights.read("layers.0.mlp.down_proj.weight").dtype == torch.float32
