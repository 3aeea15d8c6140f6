"""compressed-tensors' fp8: with inputs by token the engine keeps the bytes, else what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.errors import CheckpointError
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.kernels.plain_e4m3 import TABLE, encoded
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


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("strategy", "inputs"),
    [
        ("channel", None),
        ("tensor", INPUTS | {"strategy": "tensor", "dynamic": False}),
        ("block", INPUTS | {"strategy": "group", "group_size": 32}),
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


def by_token(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A layer's input rounded to e4m3 by NumPy, with a scale per token."""
    (x,) = given
    pieces = x.numpy().reshape(-1, x.shape[-1])
    most = np.maximum(np.abs(pieces).max(-1, keepdims=True), np.float32(1e-10))
    values = TABLE[encoded((pieces * (np.float32(448) / most)).astype(np.float64))]
    return (torch.from_numpy(values * (most / np.float32(448))).float().view(x.shape),)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_with_inputs_by_token_every_byte_is_kept(
    strategy: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, ids = tmp_path / "checkpoint", random_ids(40, seed=2)
    model = write_fp8(source, strategy, kind, INPUTS)
    folder = build(source, tmp_path / "engine", device="cpu")
    assert "14 weights keep their fp8 values as w8a8-fp8" in caplog.text
    assert (Manifest.read(folder).quant.label, Manifest.read(folder).build.dtype) == ("w8a8-fp8", "bf16")
    assert verify(folder, "cpu", note=False, source=source).verdict == "proven"
    given, stored = load_file(source / "model.safetensors"), load_file(folder / WEIGHTS_FILE)
    for part, own in (("o_proj", "self_attn.o_proj"), ("down_proj", "mlp.down_proj")):
        name = f"model.layers.1.{own}.weight"
        values, columns = stored[f"layers.1.{own}.weight"], given[name].shape[1]
        assert values.dtype == torch.float8_e4m3fn, part
        assert torch.equal(values.view(torch.uint8)[:, :columns], given[name].view(torch.uint8))
        scales = given[f"{name}_scale"].float().flatten().expand(len(values))
        assert torch.equal(stored[f"layers.1.{own}.scales"], scales)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(by_token)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    # A value near a tie may be rounded the other way, which moves its token's logits.
    off = (LLM(folder, "cpu").logits(ids) - expected).abs().amax(1) / expected.abs().amax()
    assert float((off < 1e-3).float().mean()) > 0.8
    assert float(off.max()) < 0.1


@pytest.mark.parametrize("asked", [None, "none", "w8a8-fp8"])
def test_its_own_scheme_may_be_named(asked: str | None, tmp_path: Path) -> None:
    write_fp8(tmp_path / "checkpoint", inputs=INPUTS)
    quant = LLM(tmp_path / "checkpoint", "cpu", quant=asked).engine.manifest.quant
    assert quant.source == "compressed-tensors"
    assert read_setting(str(tmp_path / "checkpoint"), quant=asked).quant.scheme == "w8a8-fp8"


def test_another_scheme_replaces_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_fp8(tmp_path / "checkpoint", inputs=INPUTS)
    folder = build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", quant="w8a16")
    quant = Manifest.read(folder).quant
    assert (quant.scheme, quant.source) == ("w8a16", "")
    assert "(fp8 14), the layers' weights then quantized to w8a16" in caplog.text
    assert read_setting(str(tmp_path / "checkpoint"), quant="w8a16").quant.scheme == "w8a16"


def test_a_head_and_parts_of_layers_in_fp8_are_dequantized(tmp_path: Path) -> None:
    """One matrix of q, k and v has one scheme."""
    source, ids = tmp_path / "checkpoint", random_ids(20, seed=3)
    write_fp8(source, inputs=INPUTS)
    tensors = load_file(source / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    del tensors[query.replace("weight", "input_scale")]
    tensors[query] = (tensors[query].float() * tensors.pop(f"{query}_scale").float()).bfloat16()
    head = tensors["lm_head.weight"].float()
    tensors["lm_head.weight_scale"] = (head.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (head / tensors["lm_head.weight_scale"].float()).clamp(-448, 448)
    tensors["lm_head.weight"] = values.to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder = build(source, tmp_path / "engine", device="cpu")
    quant = Manifest.read(folder).quant
    assert quant.layers == {"layers.0.self_attn.qkv_proj": "none"}
    assert (quant.scheme, quant.head) == ("w8a8-fp8", "none")
    assert verify(folder, "cpu", note=False, source=source).verdict == "proven"
    assert LLM(folder, "cpu").logits(ids).isfinite().all()


def test_bytes_that_contradict_the_config(tmp_path: Path) -> None:
    source, name = tmp_path / "checkpoint", "model.layers.1.mlp.up_proj.weight"
    write_fp8(source, inputs=INPUTS)
    tensors = load_file(source / "model.safetensors")
    for changed, words in (
        ({name: torch.ones(64, 40, dtype=torch.int8)}, r"up_proj: the weight is in another dtype"),
        ({f"{name}_scale": torch.ones(3, 1)}, r"up_proj: the scales do not fit"),
        ({f"{name}_scale": torch.full((64, 1), torch.inf)}, r"up_proj\.weight_scale has values"),
    ):
        save_file(tensors | changed, source / "model.safetensors", metadata={"format": "pt"})
        with raises_shown(CheckpointError, words):
            LLM(source, "cpu")


def test_the_doctor_dequantizes_it(tmp_path: Path) -> None:
    write_fp8(tmp_path / "checkpoint", inputs=INPUTS)
    data, out = tmp_path / "ids.jsonl", tmp_path / "mixed.yaml"
    data.write_text("".join(json.dumps({"token_ids": random_ids(20, seed=n)}) + "\n" for n in range(2)))
    words = ("--data", data, "--quant", "w8a8-fp8", "--budget", "kl_mean=9", "--device", "cpu", "--out", out)
    shown = ingot("doctor", tmp_path / "checkpoint", *words)
    assert shown.exit_code == 0, shown.output
    assert "8 layers in w8a8-fp8" in shown.output


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
        ({"strategy": "block", "block_structure": [8, 8]}, "scales do not fit the weight"),
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
