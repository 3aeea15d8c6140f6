"""Each layer's error in a proof, beside what numpy makes of the engine's file and the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.rptq_options import RptqConfig
from ingot.engine.proof_file import read_proof
from ingot.engine.source_figures import errors_text
from tests.e2e.terminal import ingot
from tests.quant.source_faults import SCHEMES, built, samples_of, write_source

Tensors = dict[str, np.ndarray]
IN_ORDER = QuantConfig("rptq-w4a8", 32, rptq=RptqConfig(reorder=("R1",)))
ENGINES = SCHEMES | {"rptq-w4a8, R1": IN_ORDER}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "qwen2", tie_word_embeddings=False)


def rows(tensors: Tensors) -> np.ndarray:
    """Of w8a8."""
    return tensors["weight"] * tensors["scales"].reshape(-1, 1).astype(np.float64)


def two_levels(tensors: Tensors) -> np.ndarray:
    """Of w4a8 with groups of 64: byte j holds columns j and j + 32 of its group."""
    pairs = tensors["pairs"].reshape(len(tensors["pairs"]), -1, 32)
    values = np.concatenate([pairs & 15, pairs >> 4], axis=2).astype(np.float64)
    inner = (values - tensors["zeros"].T[..., None]) * tensors["steps"].T[..., None]
    return inner.reshape(len(pairs), -1) * tensors["scales"][:, None].astype(np.float64)


def in_order(tensors: Tensors) -> np.ndarray:
    """Of RPTQ: columns stand in the stored order."""
    order = tensors["order"]
    values = tensors["weight"][:, : len(order)] * tensors["scales"][:, None].astype(np.float64)
    found = np.empty_like(values)
    found[:, order] = values
    return found


@pytest.mark.parametrize(
    ("scheme", "read"),
    [("w8a8", rows), ("w4a8 unrotated", two_levels), ("rptq-w4a8, R1", in_order)],
)
def test_one_layers_error(
    scheme: str, read: object, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, scheme, ENGINES[scheme])
    engine = built(source, tmp_path / "engine", scheme, dtype="fp32", proof=True)
    proof = read_proof(engine)
    assert proof is not None
    assert proof.claims.source is not None
    errors = proof.claims.source.errors
    name = "layers.1.self_attn.qkv_proj"
    original = load_file(source / "model.safetensors")
    weight = np.concatenate([original[f"model.{name.replace('qkv', part)}.weight"] for part in "qkv"])
    stored = load_file(engine / "weights.safetensors")
    own = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{name}.")}
    expected = np.linalg.norm(read(own) - weight) / np.linalg.norm(weight)  # type: ignore[operator]
    assert errors[name] == pytest.approx(expected, rel=6e-3)  # three digits
    assert len(errors) == 8


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w4a8 gptq", "rptq-w8a8 round", "rptq-w4a4 round"])
def test_every_scheme_has_one_for_each_layer(scheme: str, source: Path, tmp_path: Path) -> None:
    proof = read_proof(built(source, tmp_path / "engine", scheme, proof=True))
    assert proof is not None
    assert proof.claims.source is not None
    low, high = (2e-3, 2e-2) if "w8" in scheme else (3e-2, 0.3)
    assert len(proof.claims.source.errors) == 8
    assert all(low < error < high for error in proof.claims.source.errors.values())


def test_the_terminal_shows_them(source: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    calib = ("--calib", samples_of(source))
    shown = ingot("build", source, "-o", engine, "--device", "cpu", "--quant", "rptq-w8a8", *calib).stdout
    found = json.loads(ingot("inspect", engine, "--json").stdout)["proof"]["errors"]
    assert errors_text(found) in " ".join(shown.split())
    listed = " ".join(ingot("inspect", engine, "--tensors").stdout.split())
    worst = max(found, key=found.__getitem__)
    assert f"weight error {errors_text(found)}" in listed
    assert f"{worst} {100 * found[worst]:.3g} %" in listed
    ingot("build", source, "-o", tmp_path / "dense", "--device", "cpu")
    assert "weight error" not in ingot("inspect", tmp_path / "dense").stdout


def test_the_line() -> None:
    errors = {"a": 0.01, "b": 0.0333, "c": 0.02, "d": 0.0}
    assert errors_text(errors) == "mean 1.58 % of 4 layers; most b 3.33 %, c 2 %, a 1 %"
