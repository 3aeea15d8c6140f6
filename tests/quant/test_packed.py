"""Checkpoints that others quantized: their numbers are the engine's, its outputs those of their values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import BuildError, CheckpointError, ConfigError
from ingot.layers.linear import linears
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.quant.models import divergence
from tests.quant.packed_checkpoints import (
    INPUT_SCALE,
    Packing,
    Written,
    change_quantization,
    pieces,
    reference_logits,
    rounded,
    write_packed,
)
from tests.support.shown_errors import raises_shown
from tests.tiny_models import edit_config, random_ids, save_model, tiny_config

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PACKINGS = [
    Packing("gptq"),
    Packing("gptq", group=64, symmetric=False),
    Packing("gptq", group=0, symmetric=False),
    Packing("gptq", bits=8, group=32),
    Packing("gptq", bits=8, group=0, symmetric=False),
    Packing("gptq", act_order=True, symmetric=False),
    Packing("gptq", bits=8, group=64, act_order=True),
    Packing("gptq", group=0, act_order=True),
    Packing("gptq_v2", symmetric=False),
    Packing("awq", symmetric=False),
    Packing("awq", group=64, symmetric=False),
    Packing("awq", group=0, symmetric=False),
    Packing("pack"),
    Packing("pack", symmetric=False),
    Packing("pack", group=0),
    Packing("pack", bits=8, group=0),
    Packing("pack", bits=8, group=64, symmetric=False),
    Packing("pack", act_order=True),
    Packing("int", bits=8, group=0),
    Packing("int", bits=8, group=0, symmetric=False),
]

PROVEN = [PACKINGS[place] for place in (1, 3, 5, 9, 12, 16)]  # every form and number of bits


def check_layers(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    """Every linear layer of the decoder means exactly what the checkpoint's numbers do."""
    for name, linear in linears(llm.engine.model).items():
        if name == "lm_head":
            continue
        stem, _, leaf = f"model.{name}".rpartition(".")
        sources = [f"{stem}.{part}" for part in PARTS.get(leaf, (leaf,))]
        if all(source in weights for source in sources):
            expected = torch.cat([weights[source] for source in sources])
            assert torch.equal(linear.dequantized(torch.float32), expected), name


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Written]:
    """write(packing, kind, …): a packed checkpoint."""
    return partial(write_packed, tmp_path / "checkpoint")


@pytest.fixture
def engine_of(tmp_path: Path) -> Callable[..., Path]:
    """engine_of(written, …): its engine, without proof by default."""

    def make(written: Written, **options: Any) -> Path:
        return build(written.folder, tmp_path / "engine", device="cpu", **({"proof": False} | options))

    return make


Write = Callable[..., Written]
EngineOf = Callable[..., Path]


@pytest.mark.stays(
    "gptq-4-32-True-False",
    "gptq-4-0-False-False",
    "gptq-8-0-False-False",
    "gptq-8-64-True-True",
    "gptq_v2-4-32-False-False",
    "awq-4-0-False-False",
    "pack-4-32-False-False",
    "pack-8-0-True-False",
    "pack-4-32-True-True",
    "int-8-0-False-False",
)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.label)
def test_a_packed_checkpoint_runs_as_it_is(packing: Packing, write: Write, engine_of: EngineOf) -> None:
    written = write(packing)
    folder = engine_of(written)
    quant = Manifest.read(folder).quant
    assert quant.scheme == f"w{packing.bits}a16"
    assert (quant.group, quant.symmetric) == (packing.group, packing.symmetric)
    assert quant.act_order == (packing.act_order and packing.group > 0)
    ids = random_ids(40, seed=2)
    expected = reference_logits(written, ids)
    for path in (written.folder, folder):
        llm = LLM(path, "cpu")
        check_layers(llm, written.weights)
        schemes = [linear.origin for linear in linears(llm.engine.model).values()]
        assert all(scheme.small_products for scheme in schemes) != quant.act_order
        torch.testing.assert_close(llm.logits(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.stays("gptq-4-32-False-True", "pack-4-32-True-False")
@pytest.mark.parametrize(
    "packing",
    [pytest.param(each, marks=() if each in PROVEN else pytest.mark.slow) for each in PACKINGS],
    ids=lambda packing: packing.label,
)
def test_its_engine_is_proven(packing: Packing, write: Write, engine_of: EngineOf) -> None:
    assert verify(engine_of(write(packing), proof=True), "cpu", note=False).verdict == "proven"


@pytest.mark.stays("dynamic")
@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_weights_and_activations_in_8_bits(activations: str, write: Write, engine_of: EngineOf) -> None:
    """compressed-tensors W8A8: numbers and static scales are the checkpoint's, outputs near those of them."""
    written = write(Packing("int", bits=8, group=0, activations=activations))
    assert any(bool((one.numbers == 0).any()) for one in written.numbers.values())  # -128
    folder = engine_of(written, proof=True)
    quant = Manifest.read(folder).quant
    assert (quant.scheme, quant.activations, quant.source) == ("w8a8", activations, "compressed-tensors")
    assert verify(folder, "cpu", note=False).verdict == "proven"
    assert align(folder, written.folder, [random_ids(9)], steps=1, device="cpu").aligned
    for name, module in written.model.named_modules():
        if f"{name}.weight" in {f"{one}.weight" for one in written.weights}:
            module.register_forward_pre_hook(partial(rounded_input, activations, name))
    ids = random_ids(40, seed=2)
    expected = reference_logits(written, ids).log_softmax(-1)
    whole = LLM(written.folder, "cpu")
    for llm in (whole, LLM(folder, "cpu")):
        check_layers(llm, written.weights)
        assert divergence(expected, llm.logits(ids).log_softmax(-1)) < 1e-4
    if activations == "static":
        down = linears(whole.engine.model)["layers.1.mlp.down_proj"]
        assert float(down.get_parameter("input_scale")) == INPUT_SCALE


def rounded_input(activations: str, name: str, module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """An input in int8 and back; heads have scales of their own in Ingot where scales come with tokens."""
    x = inputs[0]
    if activations == "static":
        return (x / INPUT_SCALE).round().clamp(-128, 127) * INPUT_SCALE
    parts = x.unflatten(-1, (-1, 16)) if name.endswith("o_proj") else x[..., None, :]
    steps = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return ((parts / steps).round() * steps).flatten(-2)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "opt", "tied"])
@pytest.mark.parametrize("form", ["gptq", "awq", "pack"])
def test_of_other_models(kind: str, form: str, write: Write) -> None:
    """Biases, query and key norms, a tied head."""
    changes: dict[str, Any] = {"tie_word_embeddings": True} if kind == "tied" else {}
    packing = Packing(form, symmetric=form != "awq", act_order=form == "gptq", spare_biases=form != "pack")
    written = write(packing, "llama" if kind == "tied" else kind, **changes)
    llm = LLM(written.folder, "cpu")
    check_layers(llm, written.weights)
    ids = random_ids(30, seed=3)
    torch.testing.assert_close(llm.logits(ids), reference_logits(written, ids), rtol=1e-4, atol=1e-4)


SPARE = Packing("gptq", spare_biases=True)  # biases that no model has


@pytest.mark.parametrize("packing", [*(PACKINGS[i] for i in (5, 9, 13)), SPARE], ids=str)
def test_align_holds_it_to_its_own_weights(packing: Packing, write: Write, engine_of: EngineOf) -> None:
    written = write(packing)
    report = align(engine_of(written), written.folder, [random_ids(9)], steps=2, device="cpu")
    assert report.aligned, report.first_stage


def test_layers_that_are_whole_stay_whole(write: Write, engine_of: EngineOf) -> None:
    written = write(Packing("awq", symmetric=False, dense=("layers.1.mlp.down",)))
    folder = engine_of(written)
    manifest = Manifest.read(folder)
    assert manifest.quant.layers == {"layers.1.mlp.down_proj": "none"}
    assert {"layers.1.mlp.down_proj.weight", "layers.0.mlp.down_proj.words"} <= set(manifest.tensors)
    ids = random_ids(20)
    expected = reference_logits(written, ids)
    torch.testing.assert_close(LLM(folder, "cpu").logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_the_config_may_lie_beside(write: Write) -> None:
    """AutoGPTQ's quantize_config.json, which names no method."""
    written = write(Packing("gptq", symmetric=False))
    config = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    config.pop("quant_method")
    edit_config(written.folder, "quantization_config")
    (written.folder / "quantize_config.json").write_text(json.dumps(config))
    check_layers(LLM(written.folder, "cpu"), written.weights)


def test_the_head_may_be_rounded_and_layers_left_out(write: Write, engine_of: EngineOf) -> None:
    written = write(Packing("gptq"))
    folder = engine_of(written, quant=QuantConfig(head="w8a16"), layers="1:2")
    quant = Manifest.read(folder).quant
    assert (quant.head, quant.source) == ("w8a16", "gptq")
    linear = linears(LLM(folder, "cpu").engine.model)["layers.0.mlp.down_proj"]
    expected = written.weights["model.layers.1.mlp.down_proj"]
    assert torch.equal(linear.dequantized(torch.float32), expected)


def test_it_is_reported_of(write: Write, engine_of: EngineOf) -> None:
    written = write(Packing("gptq", act_order=True))
    folder = engine_of(written)
    quant = Manifest.read(folder).quant
    words = "w4a16, one scale per 32 columns, symmetric, columns grouped by act-order, as in the GPTQ"
    for path in (written.folder, folder):
        assert words in " ".join(ingot("inspect", path).stdout.split())
    for path in (written.folder, folder, written.folder / "config.json"):
        assert read_setting(str(path)).quant == quant
    planned = json.loads(ingot("plan", written.folder, "--gpu", "24GiB", "--json").stdout)
    assert {(row["dtype"], row["quant"]) for row in planned["cards"]} == {("fp16", "w4a16")}
    assert QuantConfig.from_json(quant.to_json()) == quant


def test_batch_invariant_products_follow_the_order(write: Write) -> None:
    written = write(Packing("gptq", act_order=True))
    linear = linears(LLM(written.folder, "cpu").engine.model)["layers.0.mlp.down_proj"]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    expected = x @ written.weights["model.layers.0.mlp.down_proj"].T
    for scheme in (linear.scheme, linear.scheme.batch_invariant()):
        torch.testing.assert_close(scheme.apply(x, linear._parameters), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def written_gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("gptq") / "checkpoint", Packing("gptq")).folder


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"quant_method": "bitsandbytes"}, "quantization method; seen: bitsandbytes"),
            ({"quant_method": "fp8"}, "weight_block_size of fp8"),
            ({"bits": 3}, "number of bits; seen: 3"),
            ({"bits": 2}, "number of bits; seen: 2"),
            ({"group_size": 16}, "group size; seen: 16"),
            ({"checkpoint_format": "marlin"}, "GPTQ format; seen: marlin"),
            ({"is_marlin_format": True}, "GPTQ format; seen: marlin"),
            ({"lm_head": True}, "quantized lm_head"),
            ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "different bits for"),
            ({"quant_method": "awq", "version": "gemv"}, "AWQ version; seen: gemv"),
            ({"quant_method": "awq", "checkpoint_format": None, "bits": 8}, "AWQ; seen: 8"),
            ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "seen: nvfp4-pack"),
            ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "seen: marlin-24"),
        ],
    )
    def test_formats_by_name(
        self, written_gptq: Path, tmp_path: Path, changes: dict[str, Any], words: str
    ) -> None:
        folder = copied(written_gptq, tmp_path)
        change_quantization(folder, **changes)
        with raises_shown(CheckpointError, words) as caught:
            open_checkpoint(folder)
        assert "build from the original checkpoint" in str(caught.value)

    def test_activations_in_fewer_bits(self, write: Write) -> None:
        written = write(Packing("int", bits=8, group=0))
        group = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "type": "float"}}
        change_quantization(written.folder, config_groups={"group_0": group})
        with pytest.raises(CheckpointError, match="activations"):
            LLM(written.folder, "cpu")

    @pytest.mark.parametrize("quant", ["w8a16", "w4a16", QuantConfig("w4a16", method="gptq")])
    def test_another_quantization(self, written_gptq: Path, tmp_path: Path, quant: str | QuantConfig) -> None:
        words = (
            r"already quantized \(GPTQ\); seen: .*allowed: w4a16, one scale per 32 columns.*leave out --quant"
        )
        with raises_shown(ConfigError, words):
            build(written_gptq, tmp_path / "engine", quant=quant, calib="none.jsonl", device="cpu")
        assert not (tmp_path / "engine").exists()

    def test_a_dtype_that_does_not_hold_the_scales(self, written_gptq: Path, tmp_path: Path) -> None:
        with pytest.raises(BuildError, match=r"the scales of layers\.0.* do not fit bf16.*dtype=fp16"):
            build(written_gptq, tmp_path / "engine", dtype="bf16", device="cpu")
        build(written_gptq, tmp_path / "engine", dtype="fp32", device="cpu", proof=False)

    def test_parts_in_different_orders(self, write: Write) -> None:
        packing, name = Packing("gptq", act_order=True), "model.layers.1.self_attn.k_proj"
        written = write(packing)
        other = rounded(written.weights[name], packing, written.numbers[name].index.flip(0))
        changes = {f"{name}.{k}": t.contiguous() for k, t in pieces(packing, other).items()}
        file = written.folder / "model.safetensors"
        save_file(load_file(file) | changes, file)
        reported = r"layers\.1\.self_attn\.qkv_proj.*order their columns differently"
        with raises_shown(CheckpointError, reported):
            LLM(written.folder, "cpu")

    def test_parts_that_are_packed_and_whole(self, write: Write) -> None:
        written = write(Packing("awq", symmetric=False, dense=("v_proj",)))
        with pytest.raises(CheckpointError, match=r"quantized and unquantized parts.*v_proj"):
            LLM(written.folder, "cpu")

    @pytest.mark.parametrize(
        ("packing", "changes", "reported"),
        [
            (Packing("gptq", symmetric=False), {"sym": True}, "symmetric"),
            (Packing("gptq", act_order=True), {"desc_act": False}, "g_idx.*desc_act"),
        ],
        ids=["sym", "desc_act"],
    )
    def test_values_that_contradict_the_config(
        self, write: Write, packing: Packing, changes: dict[str, Any], reported: str
    ) -> None:
        written = write(packing)
        change_quantization(written.folder, **changes)
        with pytest.raises(CheckpointError, match=rf"model\.layers\.0.*{reported}"):
            LLM(written.folder, "cpu")

    def test_tensors_that_are_missing(self, written_gptq: Path, tmp_path: Path) -> None:
        folder = copied(written_gptq, tmp_path)
        stored = load_file(folder / "model.safetensors")
        stored.pop("model.layers.0.mlp.up_proj.scales")
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lack tensors \(1\).*up_proj\.scales"):
            open_checkpoint(folder)

    def test_a_config_without_packed_layers(self, written_gptq: Path, tmp_path: Path) -> None:
        config = json.loads((written_gptq / "config.json").read_text())["quantization_config"]
        save_model(tiny_config("llama"), tmp_path / "whole")
        edit_config(tmp_path / "whole", quantization_config=config)
        with pytest.raises(CheckpointError, match="no layer is quantized"):
            open_checkpoint(tmp_path / "whole")


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))
