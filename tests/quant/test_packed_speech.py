"""Whisper as others quantize it: numbers of both halves are the engine's, outputs those of their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, Input, Prompt, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.linear import linears
from tests.encoders.speech import FRAMES, MELS, write_speech
from tests.quant.packed_checkpoints import Packing, configuration, pieces, rounded
from tests.tiny_models import edit_config, random_ids

PACKINGS = [
    Packing("pack", group=32),
    Packing("pack", bits=8, group=0, symmetric=False),
    Packing("pack", group=64, dense=("encoder.",)),
    Packing("gptq", group=64, symmetric=False),
    Packing("gptq", group=32, spare_biases=True),
    Packing("awq", group=32, symmetric=False),
    Packing("int", bits=8, group=0),
    Packing("int", bits=8, group=0, activations="dynamic"),
]
LEAVES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


@dataclass
class Written:
    """A packed checkpoint, and Hugging Face's model of what its numbers mean."""

    folder: Path
    model: Any


def write(folder: Path, packing: Packing, skip: tuple[str, ...] = ()) -> Written:
    """All linear layers of both halves but those of ``packing.dense`` and ``skip``."""
    model = write_speech(folder, 5, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.half().float())
    stored = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]:
        left = any(part in name for part in (*packing.dense, *skip))
        if name.rpartition(".")[2] not in LEAVES or left:
            continue
        weight = stored.pop(f"{name}.weight").float()
        index = torch.arange(weight.shape[1]) // (packing.group or weight.shape[1])
        one = rounded(weight, packing, index)
        stored |= {f"{name}.{end}": tensor.contiguous() for end, tensor in pieces(packing, one).items()}
        model.get_submodule(name).weight.data.copy_(one.values())
        if packing.spare_biases:
            stored.setdefault(f"{name}.bias", torch.zeros(len(weight), dtype=torch.float16))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="float16", quantization_config=configuration(packing))
    return Written(folder, model)


FEATURES = torch.randn(MELS, FRAMES, generator=torch.Generator().manual_seed(1))
IDS = random_ids(30, seed=2)
GIVEN = Prompt([Input(FEATURES), IDS])


@torch.no_grad()
def expected(written: Written) -> torch.Tensor:
    logits: torch.Tensor = written.model(FEATURES[None], decoder_input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.stays("pack-4-64-True-False-none", "awq-4-32-False-False-none", "int-8-0-True-False-dynamic")
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: f"{packing.label}-{packing.activations}")
def test_it_runs_as_it_is(packing: Packing, tmp_path: Path) -> None:
    written = write(tmp_path / "checkpoint", packing)
    engine = build(written.folder, tmp_path / "engine", device="cpu", proof=False)
    quant = Manifest.read(engine).quant
    rounds = packing.activations != "none"
    assert quant.scheme == f"w{packing.bits}a{8 if rounds else 16}"
    narrow = {name for name, one in linears(LLM(engine, "cpu").engine.model).items() if not one.origin.dense}
    assert any(name.startswith("encoder.") for name in narrow) == ("encoder." not in packing.dense)
    assert any(name.startswith("layers.") for name in narrow)
    wanted = expected(written)
    for place in (written.folder, engine):
        found = LLM(place, "cpu").logits(GIVEN)
        if rounds:
            assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.1
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_another_scheme_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", PACKINGS[0]).folder
    with pytest.raises(ConfigError, match="already quantized"):
        build(folder, tmp_path / "engine", device="cpu", quant=QuantConfig("w8a16"))


def test_parts_of_a_product_are_packed_alike(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", PACKINGS[0], skip=("encoder.layers.1.self_attn.k_proj",)).folder
    with pytest.raises(CheckpointError, match=r"quantized and unquantized parts.*k_proj"):
        build(folder, tmp_path / "engine", device="cpu", proof=False)
