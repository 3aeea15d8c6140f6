"""GGUF files: the engine computes what Hugging Face's class does with the values that the file holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.building.source.source_gguf import MEANT
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.gguf.gguf_header import BLOCK_TYPES, BlockType
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import BuildError, CheckpointError
from ingot.layers.linear import linears
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.gguf.gguf_files import BPE, VOCABULARY, tiny, write_gguf
from tests.tiny_models import random_ids

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.weight": "Q6_K"}


def check_logits(path: Path, model: PreTrainedModel, tolerance: float = 1e-4) -> LLM:
    llm, ids = LLM(path, "cpu"), random_ids(40, seed=2)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(llm.logits(ids), expected, rtol=tolerance, atol=tolerance)
    return llm


def check_layers(llm: LLM, model: PreTrainedModel) -> None:
    """Every layer of the decoder means exactly what the file does."""
    weights = model.state_dict()
    for name, linear in linears(llm.engine.model).items():
        if name == "lm_head":
            continue
        stem, _, leaf = f"model.{name}".rpartition(".")
        expected = torch.cat([weights[f"{stem}.{part}.weight"] for part in PARTS.get(leaf, (leaf,))])
        assert torch.equal(linear.dequantized(torch.float32), expected), name


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
def test_plain_weights(kind: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny(kind), form)
    folder = build(path, tmp_path / "engine", device="cpu", proof=False, dtype="fp32")
    check_logits(folder, model)
    manifest = Manifest.read(folder)
    assert (manifest.quant.dense, manifest.model.architecture) == (True, kind)
    with open_checkpoint(path) as source:
        assert torch.equal(source.read("model.norm.weight"), model.state_dict()["model.norm.weight"])


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("form", "scheme"), [("Q8_0", "w8a16"), ("Q4_0", "w4a16")])
def test_values_that_a_scheme_holds_are_kept(
    kind: str, form: str, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q4_0 has scales below 0; a head in 6 bits is dequantized."""
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny(kind), form, {"output.weight": "Q8_0"})
    folder = build(path, tmp_path / "engine", device="cpu", dtype="fp32")
    quant = Manifest.read(folder).quant
    assert (quant.scheme, quant.group, quant.symmetric, quant.source) == (scheme, 32, True, "gguf")
    assert f"14 weights keep their {form} values as {scheme}, group 32; 2 quantized tensors" in caplog.text
    assert verify(folder, "cpu", note=False).verdict == "proven"
    check_layers(check_logits(folder, model), model)
    rounded = {
        name: values.half().float() for name, values in model.state_dict().items() if "proj.w" not in name
    }
    model.load_state_dict(rounded, strict=False)
    llm = check_logits(path, model)
    check_layers(llm, model)
    assert llm.engine.manifest.build.dtype == "fp16"


@pytest.mark.parametrize(
    ("form", "others"),
    [("Q4_K", K_M), ("Q5_K", K_M), ("Q6_K", {}), ("Q5_0", {"ffn": "Q5_1", "attn_v": "Q4_1"})],
    ids=["Q4_K_M", "Q5_K_M", "Q6_K", "Q5_0"],
)
def test_other_types_are_dequantized(
    form: str, others: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny("llama", wide=True), form, others)
    folder = build(path, tmp_path / "engine", device="cpu", dtype="fp32")
    llm = check_logits(folder, model)
    check_layers(llm, model)
    assert llm.engine.manifest.quant.dense
    assert "9 quantized tensors are dequantized to fp32" in caplog.text
    assert verify(folder, "cpu", note=False).verdict == "proven"
    assert LLM(path, "cpu").engine.manifest.build.dtype == "fp16"


@pytest.mark.parametrize(
    "kind", [kind for kind in BLOCK_TYPES.values() if kind.values > 1], ids=lambda kind: kind.name
)
def test_the_second_reading(kind: BlockType) -> None:
    """What a proof compares with gives the package's values of any bytes."""
    blocks = np.random.default_rng(0).integers(0, 256, (300, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind.id))
    got = MEANT[kind.name](torch.from_numpy(blocks), torch.arange(kind.values)).numpy()
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    assert np.array_equal(got[finite], expected[finite])


def test_layers_in_other_types_stay_whole(tmp_path: Path) -> None:
    """A product of several weights is kept only where all are of one type."""
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny("qwen2"), "Q4_0", {"blk.0.attn_v": "Q8_0", "blk.1.ffn_down": "F16"})
    folder = build(path, tmp_path / "engine", device="cpu", dtype="fp32")
    dense = {"layers.0.self_attn.qkv_proj": "none", "layers.1.mlp.down_proj": "none"}
    assert Manifest.read(folder).quant.layers == dense
    check_layers(check_logits(folder, model), model)


def test_a_tied_head(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny("llama", tie_word_embeddings=True), "Q8_0")
    llm = check_logits(build(path, tmp_path / "engine", device="cpu", dtype="fp32"), model)
    assert llm.engine.manifest.model.tie_word_embeddings


def test_only_some_layers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny("llama"), "Q8_0")
    folder = build(path, tmp_path / "engine", device="cpu", layers="1:2", quant=QuantConfig(head="w8a16"))
    assert verify(folder, "cpu", note=False).verdict == "proven"
    linear = linears(LLM(folder, "cpu").engine.model)["layers.0.mlp.down_proj"]
    assert torch.equal(linear.dequantized(torch.float32), model.model.layers[1].mlp.down_proj.weight)


@pytest.mark.parametrize("quant", ["w4a16", "w8a8"])
def test_another_scheme_quantizes_again(quant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, tiny("llama"), "Q8_0")
    folder = build(path, tmp_path / "engine", device="cpu", quant=quant)
    found = Manifest.read(folder).quant
    assert (found.scheme, found.source) == (quant, "")
    line = f"dequantized to fp16 (Q8_0 16), the layers' weights then quantized to {quant}"
    assert line in caplog.text
    assert read_setting(str(path), quant=quant).quant == found
    rest = model.model.layers[0].mlp.down_proj.weight.detach()
    with open_checkpoint(path) as source:  # rounded only once
        assert torch.equal(source.read("model.layers.0.mlp.down_proj.weight"), rest)
    got = linears(LLM(folder, "cpu").engine.model)["layers.0.mlp.down_proj"].dequantized(torch.float32)
    assert 0 < float((got - rest).abs().max()) < 0.1 * float(rest.abs().max())


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"llama.rope.freq_base": 500000.0}, {"rope_type": "default"}),
    ],
    ids=["linear", "yarn", "base"],
)
def test_rotary_settings(metadata: dict[str, Any], scaling: dict[str, Any], tmp_path: Path) -> None:
    theta = metadata.get("llama.rope.freq_base", 10000.0)
    model = tiny("llama", rope_parameters=scaling | {"rope_theta": theta})
    check_logits_of(model, tmp_path, metadata)


def test_scaling_of_llama3(tmp_path: Path) -> None:
    """The file has what each frequency is divided by: here 1, 1, 1, …, one between, 8."""
    own = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    own |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny("llama", rope_parameters=own)
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(divisors.round(3))) > 2
    check_logits_of(model, tmp_path, {}, {"rope_freqs.weight": divisors})
    wrong = {"rope_freqs.weight": divisors * np.float32(1.1)}
    write_gguf(tmp_path / "wrong.gguf", model, "F32", vectors=wrong)
    with pytest.raises(CheckpointError, match=r"unsupported rope_freqs\.weight.*llama3"):
        LLM(tmp_path / "wrong.gguf", "cpu")


def check_logits_of(
    model: PreTrainedModel, folder: Path, metadata: dict[str, Any], vectors: dict[str, Any] | None = None
) -> None:
    path = folder / "model.gguf"
    write_gguf(path, model, "F32", metadata=metadata, vectors=vectors)
    check_logits(path, model)


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("qwen2"), "Q8_0", metadata=BPE)
    folder = build(path, tmp_path / "engine", device="cpu", proof=False)
    for place in (path, folder):
        llm = LLM(place, "cpu")
        assert llm.tokenizer is not None
        assert llm.tokenizer.encode("hi<|im_end|>") == [VOCABULARY.index("hi"), 95]
        assert llm.tokenizer.encode("<|im_end|>", parse_special=False) != [95]
        assert llm.engine.manifest.stop_ids == (95,)
        assert llm.engine.text.chat is not None
        assert llm.chat([{"role": "user", "content": "hi"}], max_new_tokens=2).prompt_token_ids == [
            94,
            VOCABULARY.index("hi"),
            95,
        ]


def test_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("qwen2"), "Q8_0", metadata=BPE)
    shown = " ".join(ingot("inspect", path).stdout.split())
    assert "w8a16, one scale per 32 columns, symmetric, as in the GGUF checkpoint" in shown
    planned = json.loads(ingot("plan", path, "--gpu", "24GiB", "--json").stdout)
    assert {(row["dtype"], row["quant"]) for row in planned["cards"]} == {("fp16", "w8a16")}
    assert ingot("build", path, "-o", tmp_path / "engine", "--device", "cpu").exit_code == 0
    assert "14 weights keep their Q8_0 values as w8a16" in caplog.text
    assert ingot("verify", tmp_path / "engine", "--source", path, "--device", "cpu").exit_code == 0


@pytest.mark.parametrize(("kind", "form"), [("llama", "Q4_0"), ("qwen2", "Q5_0")])
def test_it_is_aligned_with_its_file(kind: str, form: str, tmp_path: Path) -> None:
    """Hugging Face's class runs the file's values, written as a checkpoint."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny(kind), form, metadata=BPE)
    folder = build(path, tmp_path / "engine", device="cpu", proof=False)
    report = align(folder, path, ["hi", random_ids(9)], steps=2, device="cpu", original="hf")
    assert report.aligned, report.first_stage


def test_bf16_does_not_hold_the_scales(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"), "Q8_0")
    with pytest.raises(BuildError, match=r"do not fit bf16.*`dtype=fp16`, or auto, or `quant`"):
        build(path, tmp_path / "engine", dtype="bf16", device="cpu")


def test_it_needs_the_package_for_other_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"), "Q8_0", {"output.weight": "F16", "token_embd": "F16"})
    write_gguf(tmp_path / "other.gguf", tiny("llama"), "Q5_0")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    LLM(path, "cpu").close()
    with pytest.raises(CheckpointError, match=r"needs the package gguf; to fix: pip install"):
        LLM(tmp_path / "other.gguf", "cpu")


def test_temporary_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, place = tmp_path / "model.gguf", tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    write_gguf(path, tiny("qwen2"), "F16", metadata=BPE)
    LLM(path, "cpu").close()
    assert not list(place.iterdir())


def test_nothing_is_reported_of_whole_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"), "F16")
    with caplog.at_level(logging.WARNING):
        LLM(path, "cpu").close()
    assert "quantized" not in caplog.text
