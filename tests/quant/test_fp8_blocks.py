"""w8a8-fp8 in blocks of 128 x 128: what is stored and computed, and checkpoints that come so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.checkpoint.packed_config import packed_format
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.engine_facts import describe
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.errors import BuildError, CheckpointError, ConfigError
from ingot.kernels.product.int8 import fp8_library
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.proof.verify_engine import verify
from ingot.quant.plain_rows import rounded_e4m3
from ingot.quant.schemes.fp8_both import Fp8Both
from ingot.quant.schemes.scheme_registry import make_scheme
from tests.e2e.terminal import ingot
from tests.kernels.plain_e4m3 import TABLE, bits_of, encoded, plain
from tests.support.shown_errors import raises_shown
from tests.tiny_models import edit_config, make_model, random_ids, tiny_config

B = 128
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SCHEME = Fp8Both(blocks=True)
GROUPED = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": B, "dynamic": True}
AS_STORED: dict[str, Any] = {"quant": QuantConfig("w8a8-fp8", weight_scales="block")}
Tensors = dict[str, torch.Tensor]


def some(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp()


def by_group(x: torch.Tensor) -> torch.Tensor:
    """An input rounded to e4m3 by NumPy, with a scale per 128 columns of a row, fp64."""
    pieces = x.float().numpy().reshape(-1, x.shape[-1] // B, B)
    most = np.maximum(np.abs(pieces).max(-1, keepdims=True), np.float32(1e-10))
    values = TABLE[encoded((pieces * (np.float32(448) / most)).astype(np.float64))]
    return torch.from_numpy(values * (most / np.float32(448))).reshape(x.shape)


def in_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Scales beside the values of a weight."""
    return torch.kron(scales, torch.ones(B, B))[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize(("outputs", "columns"), [(1, 128), (128, 128), (200, 384), (300, 256)])
def test_values_are_the_nearest_and_a_block_has_one_scale(outputs: int, columns: int) -> None:
    weight = some(outputs, columns)
    tensors = SCHEME.pack(weight)
    assert [(one.shape, one.dtype) for one in tensors.values()] == [
        (one.shape, one.dtype) for one in SCHEME.layout(outputs, columns, False, torch.float16).values()
    ]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % B)).reshape(-1, B, columns // B, B)
    torch.testing.assert_close(tensors["scales"], padded.abs().amax((1, 3)) / 448, rtol=3e-7, atol=0)
    wide = in_blocks(weight, tensors["scales"]).double()
    near = TABLE[encoded((weight.double() / wide).numpy())]
    assert (near != TABLE[bits_of(tensors["weight"])]).mean() < 0.01
    meant = SCHEME.dequantize(tensors, columns, torch.float64)
    torch.testing.assert_close(meant, plain(tensors["weight"]) * wide, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [1, 6, 70])
def test_the_product_is_that_of_what_the_values_mean(rows: int) -> None:
    weight, bias, x = some(200, 384), some(200, 1)[:, 0], some(rows, 384)
    tensors = SCHEME.pack(weight, bias)
    meant = plain(tensors["weight"]) * in_blocks(weight, tensors["scales"]).double()
    expected = by_group(x) @ meant.T + bias
    torch.testing.assert_close(SCHEME.apply(x, tensors).double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        rounded_e4m3(x, SCHEME.input_group).double(), by_group(x), rtol=0.13, atol=1e-6
    )
    invariant = SCHEME.batch_invariant()
    alone = torch.cat([invariant.apply(row[None], tensors) for row in x])
    assert torch.equal(alone, invariant.apply(x, tensors))


def test_what_has_no_whole_blocks_is_refused() -> None:
    for call in (lambda: SCHEME.layout(8, 200, False, torch.float16), lambda: SCHEME.pack(some(8, 200))):
        with raises_shown(BuildError, "200 columns; .*multiple of 128"):
            call()
    with raises_shown(ConfigError, "weight"):
        QuantConfig("w8a8", weight_scales="block")
    with raises_shown(ConfigError, "weight"):
        QuantConfig("w8a8-fp8", weight_scales="blocks")
    config = QuantConfig("w8a8-fp8", weight_scales="block")
    assert "scales per block of 128 x 128" in config.summary
    assert make_scheme(config) == SCHEME


def test_an_engine_built_so_is_proven(tmp_path: Path) -> None:
    make_model(tiny_config("qwen3", **SIZES), seed=1).save_pretrained(tmp_path / "model")
    words = ("--quant", "w8a8-fp8", "--weight-scales", "block", "--device", "cpu")
    shown = ingot("build", tmp_path / "model", "-o", tmp_path / "engine", *words)
    assert shown.exit_code == 0, shown.output
    assert verify(tmp_path / "engine", "cpu", note=False, source=tmp_path / "model").verdict == "proven"


def write_blocks(folder: Path, inner: str = "fp8", changes: Any = None, **sizes: int) -> PreTrainedModel:
    """A checkpoint in blocks, as transformers (``fp8``) or compressed-tensors writes them, and Hugging
    Face's model of its values.
    """
    model = make_model(tiny_config("qwen3", **SIZES | sizes), seed=4)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tensors = {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
    meant = {name: one.float() for name, one in tensors.items()}
    end = "_scale_inv" if inner == "fp8" else "_scale"
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        weight = tensors[name].float()
        rows = [piece.split(B, 1) for piece in weight.split(B)]
        scales = torch.stack([torch.stack([one.abs().amax() for one in row]) for row in rows]) / 448
        scales = scales.to(torch.bfloat16)
        wide = in_blocks(weight, scales.float())
        tensors[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + end] = scales
        meant[name] = tensors[name].float() * wide
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if inner == "fp8":
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        config |= {"weight_block_size": [B, B], "modules_to_not_convert": ["lm_head"]}
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [B, B]}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": GROUPED}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        config |= {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    edit_config(folder, quantization_config=config | (changes or {}))
    model.load_state_dict(meant, strict=False)
    return model


def change(folder: Path, changed: dict[str, torch.Tensor | None]) -> Tensors:
    """Other tensors in a checkpoint, or (None) fewer; those that it had."""
    before = load_file(folder / "model.safetensors")
    now = {name: one for name, one in (before | changed).items() if one is not None}
    save_file(now, folder / "model.safetensors", metadata={"format": "pt"})
    return before


@pytest.mark.parametrize("inner", ["fp8", "compressed-tensors"])
def test_every_byte_is_kept(inner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, ids = tmp_path / "checkpoint", random_ids(40, seed=2)
    model = write_blocks(source, inner)
    given = {} if inner == "fp8" else AS_STORED  # with these options, too, or without
    folder = build(source, tmp_path / "engine", device="cpu", **given)
    assert "weights keep their fp8 values as w8a8-fp8" in caplog.text
    quant = Manifest.read(folder).quant
    assert (quant.label, quant.weight_scales, quant.source) == ("w8a8-fp8", "block", inner)
    assert verify(folder, "cpu", note=False, source=source).verdict == "proven"
    given, stored = load_file(source / "model.safetensors"), load_file(folder / WEIGHTS_FILE)
    for own in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.1.{own}.weight"
        assert torch.equal(stored[f"layers.1.{own}.weight"].view(torch.uint8), given[name].view(torch.uint8))
        scales = given.get(f"{name}_scale_inv", given.get(f"{name}_scale"))
        assert scales is not None
        assert torch.equal(stored[f"layers.1.{own}.scales"], scales.float())
    assert stored["layers.1.self_attn.qkv_proj.scales"].shape == (4, 1)  # 256, 128 and 128 rows
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given: (by_group(given[0]).float(),))
    with torch.no_grad():
        expected = model(torch.tensor(ids)[:, None]).logits[:, 0]
    # A value near a tie may be rounded the other way, which moves its token's logits: so each token alone.
    llm = LLM(folder, "cpu")
    found = torch.cat([llm.logits([token]) for token in ids])
    off = (found - expected).abs().amax(1) / expected.abs().amax()
    assert float((off < 1e-5).float().mean()) > 0.8
    assert float(off.max()) < 0.1


@pytest.mark.parametrize("inner", ["fp8", "compressed-tensors"])
def test_other_schemes_replace_it(inner: str, tmp_path: Path) -> None:
    write_blocks(tmp_path / "checkpoint", inner)
    source = str(tmp_path / "checkpoint")
    for given, expected in (
        ({}, ("w8a8-fp8", "block")),
        (AS_STORED, ("w8a8-fp8", "block")),
        ({"quant": "w8a8-fp8"}, ("w8a8-fp8", "channel")),
    ):
        quant = read_setting(source, **given).quant
        assert (quant.scheme, quant.weight_scales) == expected
    folder = build(source, tmp_path / "engine", device="cpu", quant="w8a16")
    assert verify(folder, "cpu", note=False, source=tmp_path / "checkpoint").verdict == "proven"


def test_parts_of_no_whole_blocks_are_dequantized(tmp_path: Path) -> None:
    """Keys of 64 rows end inside a block of q, k and v; gates of 192 before the up projection."""
    write_blocks(tmp_path / "checkpoint", num_key_value_heads=1, intermediate_size=192)
    folder = build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", **AS_STORED)
    quant = Manifest.read(folder).quant
    names = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert quant.layers == {f"layers.{layer}.{name}": "none" for layer in range(2) for name in names}
    assert verify(folder, "cpu", note=False, source=tmp_path / "checkpoint").verdict == "proven"


@pytest.mark.parametrize(
    "changes", [{"weight_block_size": [64, 128]}, {"activation_scheme": "static"}], ids=["64", "static"]
)
def test_other_blocks_and_inputs_are_dequantized(changes: Any, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    write_blocks(source, changes=changes)
    if "weight_block_size" in changes:
        stored = load_file(source / "model.safetensors")
        twice = {n: s.repeat_interleave(2, 0) for n, s in stored.items() if n.endswith("_inv")}
        change(source, dict(twice))
    folder = build(source, tmp_path / "engine", device="cpu")
    assert Manifest.read(folder).quant.dense
    assert verify(folder, "cpu", note=False, source=source).verdict == "proven"


def test_what_products_cannot_read_is_not_kept() -> None:
    fine = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [B, B]}
    found = packed_format({"quantization_config": fine})
    assert found is not None
    assert found.kept
    for change in ({"activation_scheme": "static"}, {"weight_block_size": [64, B]}):
        other = packed_format({"quantization_config": fine | change})
        assert other is not None
        assert not other.kept
    for blocks, inputs, kept in (
        ([B, B], GROUPED, True),
        ([64, B], GROUPED, False),
        ([B, 64], GROUPED, False),
        ([B, B], GROUPED | {"group_size": 64}, False),
        ([B, B], GROUPED | {"dynamic": False}, False),
    ):
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": blocks}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        one = packed_format({"quantization_config": config | {"config_groups": {"group_0": group}}})
        assert one is not None
        assert one.kept == kept, (blocks, inputs)


def test_a_piece_of_a_weight_has_the_scales_of_its_blocks() -> None:
    weight = Int8Weight(torch.zeros(300, 256, dtype=torch.int8), torch.rand(3, 2))
    for rows in (slice(0, 128), slice(128, 300), slice(128, 200)):
        assert torch.equal(weight.piece(rows).beside(), weight.beside()[rows])
    assert SCHEME.placing_rows(torch.device("cpu")) == 0  # no kernel finds groups' scales in its epilogue


def test_tensors_that_contradict_the_config(tmp_path: Path) -> None:
    source, name = tmp_path / "checkpoint", "model.layers.1.mlp.up_proj.weight"
    write_blocks(source)
    own = load_file(source / "model.safetensors")[name]
    inverse = f"{name}_scale_inv"
    for changed, words in (
        ({inverse: None}, r"lack their scales \(1\).*up_proj\.weight_scale"),
        ({inverse: torch.ones(2, 2)}, r"up_proj: the scales do not fit the blocks.*\[2, 2\].*\[2, 1\]"),
        ({inverse: torch.ones(2)}, r"up_proj: the scales do not fit the blocks"),
        ({inverse: torch.ones(0, 1)}, r"up_proj: the scales do not fit the blocks"),
        ({inverse: torch.ones(2, 1, dtype=torch.int32)}, r"up_proj: the scales do not fit the blocks"),
        ({inverse: torch.full((2, 1), torch.nan)}, r"up_proj\.weight_scale has values that are not finite"),
        ({name: own.float().to(torch.float8_e5m2)}, r"up_proj: the weight is in another dtype"),
        ({name: own.float().bfloat16()}, r"up_proj: the weight is in another dtype"),
        ({f"{name}_scale": torch.ones(2, 1)}, r"weights have two scales"),
    ):
        before = change(source, changed)
        with raises_shown(CheckpointError, words):
            build(source, tmp_path / "engine", device="cpu", **AS_STORED)
        save_file(before, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fmt": "e5m2"}, "e5m2.*e4m3"),
        ({"weight_block_size": None}, "weight_block_size of fp8"),
        ({"weight_block_size": [128]}, "weight_block_size of fp8"),
        ({"weight_block_size": [128, 0]}, "weight_block_size of fp8"),
        ({"weight_block_size": [128, True]}, "weight_block_size of fp8"),
        ({"weight_block_size": "128"}, "weight_block_size of fp8"),
        ({"activation_scheme": "none"}, "activation_scheme of fp8"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt"),
    ],
)
def test_configs_that_are_refused(changes: Any, words: str, tmp_path: Path) -> None:
    write_blocks(tmp_path / "checkpoint", changes=changes)
    with raises_shown(CheckpointError, words):
        LLM(tmp_path / "checkpoint", "cpu")


def test_inspect_says_what_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the matrix library multiplies prompts; parts for the next norm, and odd heads, are ours."""
    write_blocks(tmp_path / "c", hidden_size=512, intermediate_size=1024, head_dim=128)
    assert describe(tmp_path / "c").kernels["with prompts"].startswith("qkv, output, up, down: fp8 products")
    monkeypatch.setattr(fp8_library, "_has_product", lambda device: True)
    monkeypatch.setattr(fp8_library, "_has_blocks", lambda *versions: True)
    found = describe(tmp_path / "c").kernels
    assert found["with prompts"] == "qkv, output, up, down: matrix library in fp8; head: small kernels"
    assert found["decode, 1 to 64 requests"].startswith("qkv, output, up, down: fp8 products")
    assert found["decode, 65 to 256 requests"].startswith("qkv, up: matrix library in fp8; output, down: fp8")
