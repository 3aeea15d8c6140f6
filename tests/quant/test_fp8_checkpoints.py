"""compressed-tensors' fp8: the engine computes with what Hugging Face's class has as weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError
from ingot.proof.verify_engine import verify
from tests.support.shown_errors import raises_shown
from tests.tiny_models import edit_config, make_model, random_ids, tiny_config

BLOCK = (16, 32)  # of 64 rows and 40 columns: the last of a row is shorter
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def scales_of(weight: torch.Tensor, strategy: str) -> torch.Tensor:
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / 448
    if strategy == "tensor":
        return weight.abs().amax().reshape(1) / 448
    rows = weight.split(BLOCK[0], 0)
    return torch.stack([torch.stack([p.abs().amax() for p in r.split(BLOCK[1], 1)]) for r in rows]) / 448


def beside(scales: torch.Tensor, weight: torch.Tensor, strategy: str) -> torch.Tensor:
    if strategy != "block":
        return scales
    wide = torch.kron(scales, torch.ones(BLOCK))
    return wide[: weight.shape[0], : weight.shape[1]]


def write_fp8(
    folder: Path, strategy: str = "channel", kind: str = "llama", inputs: Any = None, changes: Any = None
) -> PreTrainedModel:
    """A checkpoint whose layers are in e4m3, and Hugging Face's model of their values."""
    sizes = {"hidden_size": 40, "intermediate_size": 64, "head_dim": 16}
    model = make_model(tiny_config(kind, **sizes), seed=4)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tensors = {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
    meant = {name: one.float() for name, one in tensors.items()}
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scales = scales_of(weight, strategy).to(torch.bfloat16)
        wide = beside(scales.float(), weight, strategy)
        tensors[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scales
        if inputs:
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
        meant[name] = tensors[name].float() * wide
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(BLOCK)
    group = {"targets": ["Linear"], "weights": weights | (changes or {}), "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    edit_config(folder, quantization_config=config | {"config_groups": {"group_0": group}})
    model.load_state_dict(meant, strict=False)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("strategy", "inputs"),
    [
        ("channel", INPUTS),
        ("tensor", INPUTS | {"strategy": "tensor", "dynamic": False}),
        ("block", None),
    ],
    ids=["channel", "tensor", "block"],
)
def test_weights_are_what_their_values_mean(
    strategy: str, inputs: Any, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, ids = tmp_path / "checkpoint", random_ids(40, seed=2)
    model = write_fp8(source, strategy, kind, inputs)
    folder = build(source, tmp_path / "engine", device="cpu", dtype="fp32")
    assert "14 quantized tensors are dequantized to fp32 (fp8 14)" in caplog.text
    assert Manifest.read(folder).quant.dense
    assert verify(folder, "cpu", note=False, source=source).verdict == "proven"
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(LLM(folder, "cpu").logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_by_default_it_is_in_16_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_fp8(tmp_path / "checkpoint")
    llm = LLM(tmp_path / "checkpoint", "cpu")
    assert (llm.engine.manifest.build.dtype, llm.engine.manifest.source_dtype) == ("bf16", "bf16")
    assert read_setting(str(tmp_path / "checkpoint")).stored_dtype == "bf16"
    assert "dequantized to bf16 (fp8 14)" in caplog.text


def test_another_scheme_quantizes_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_fp8(tmp_path / "checkpoint")
    folder = build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", quant="w8a16")
    assert Manifest.read(folder).quant.scheme == "w8a16"
    assert "(fp8 14), the layers' weights then quantized to w8a16" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 4}, "weights; seen: .*8-bit float"),
        ({"type": "int"}, "weights; seen: .*8-bit float"),
        ({"symmetric": False}, "weights; seen: .*8-bit float"),
        ({"strategy": "group", "group_size": 32}, "weights; seen: .*channel, tensor or block"),
        ({"strategy": "block"}, "block_structure of compressed-tensors"),
        ({"strategy": "block", "block_structure": [0, 4]}, "block_structure of compressed-tensors"),
        ({"strategy": "block", "block_structure": [8, 8]}, "scales of .* do not fit it"),
        ({"actorder": "group"}, "weights; seen: .*8-bit float"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_fp8(tmp_path / "checkpoint", changes=changes)
    with raises_shown(CheckpointError, words):
        LLM(tmp_path / "checkpoint", "cpu")


def test_other_inputs(tmp_path: Path) -> None:
    write_fp8(tmp_path / "checkpoint", inputs={"num_bits": 8, "type": "int"})
    with raises_shown(CheckpointError, "activations beside fp8 weights"):
        open_checkpoint(tmp_path / "checkpoint")


def test_scales_that_are_missing_or_not_finite(tmp_path: Path) -> None:
    folder, name = tmp_path / "checkpoint", "model.layers.1.mlp.up_proj.weight"
    write_fp8(folder)
    tensors = load_file(folder / "model.safetensors")
    broken = tensors | {name: torch.full_like(tensors[name].float(), torch.nan).to(torch.float8_e4m3fn)}
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has values that are not finite"):
        LLM(folder, "cpu")
    del tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack their scales \(1\).*up_proj\.weight_scale"):
        open_checkpoint(folder)
    whole = {key: value for key, value in tensors.items() if "proj" not in key}
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no weight is in fp8"):
        open_checkpoint(folder)
