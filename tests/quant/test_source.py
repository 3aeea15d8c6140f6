"""A build compares what it stored with the checkpoint: sound engines pass, and faults are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import build
from ingot.building.source.quantized_check import judge_narrow
from ingot.building.source.source_check import SourceCheck, compare_with_source
from ingot.building.source.source_names import OPENAI, TABLES, made_of
from ingot.building.source.source_packed import Packing as Form
from ingot.building.source.source_packed import meant
from ingot.building.source.tensor_origin import Known
from ingot.checkpoint import name_rules as rules
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.proof_file import read_proof
from ingot.errors import BuildError, CheckpointError
from ingot.layers.linear import Linear
from ingot.models.model_registry import ARCHITECTURES
from ingot.proof.verify_engine import verify
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.linear_scheme import LinearScheme
from ingot.quant.schemes.weight_only import WeightOnly
from tests.e2e.terminal import ingot
from tests.quant.packed_checkpoints import Packing, write_packed
from tests.quant.source_faults import DOWN, FAULTS, QKV, SCHEMES, Stored, built, planted, write_source

CPU = torch.device("cpu")
# What so small a model cannot tell from rounding: a scale of AWQ beside factors that few rows tell, and a
# value of 8 bits more in a row whose values make up for one another's errors.
UNSEEN = {
    ("w4a16 awq", "one scale x 1.02"),
    ("rptq-w8a8", "one row's zeros off by one"),
    ("rptq-w4a8", "one row's zeros off by one"),
}
NAMES = {
    "scales x 1.05 (qkv)": "layers.0.self_attn.qkv_proj",
    "q and k swapped": "layers.0.self_attn.qkv_proj",
    "a bias lost": "layers.0.self_attn.qkv_proj.bias",
    "gate and up swapped": "layers.1.mlp.gate_up_proj",
    "a row rolled": "layers.1.self_attn.o_proj",
    "a row dropped": "layers.1.self_attn.o_proj",
    "transposed": "layers.1.self_attn.o_proj",
    "head rolled by a row": "lm_head.weight",
    "norm x 1.01": "layers.1.",
    "an embedding row wrong": "embed_tokens.weight",
}
OFTEN = ("dense", "w8a16", "w4a16 gptq", "w4a16 awq", "w4a8 gptq", "rptq-w8a8 round")
TURNS = [pytest.param(scheme, 1 if scheme in OFTEN else 3, id=scheme) for scheme in SCHEMES] + [
    pytest.param(scheme, 1, id=f"{scheme}, every fault", marks=pytest.mark.slow)
    for scheme in SCHEMES
    if scheme not in OFTEN
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with biases and a head of its own."""
    return write_source(tmp_path_factory.mktemp("source") / "qwen2", tie_word_embeddings=False)


def compared(engine: Path, source: Path) -> SourceCheck:
    return compare_with_source(engine, source, CPU)


@pytest.mark.stays(
    "dense",
    "w8a16",
    "w4a16 gptq",
    "w4a16 awq",
    "w4a16 symmetric",
    "w8a8 per tensor",
    "w8a8 smoothquant",
    "w4a8 gptq",
    "w4a8 unrotated",
    "rptq-w8a8 round",
    "rptq-w4a4 round",
)
@pytest.mark.parametrize(("scheme", "step"), TURNS)
def test_faults_are_named(scheme: str, step: int, source: Path, tmp_path: Path) -> None:
    """Every fault, or in turn every third."""
    faults = list(FAULTS)[list(SCHEMES).index(scheme) % step :: step]
    engine, unseen = built(source, tmp_path / "engine", scheme), set()
    sound = compared(engine, source)
    assert sound.differences == ()
    assert sound.figures.worst <= 1
    for fault in faults:
        if not planted(engine, tmp_path / "planted", fault):
            continue
        found = compared(tmp_path / "planted", source).differences
        if not found:
            unseen.add((scheme, fault))
        else:
            assert any(one.name.startswith(NAMES.get(fault, DOWN)) for one in found), (fault, found)
    assert unseen == {pair for pair in UNSEEN if pair[0] == scheme and pair[1] in faults}


def test_a_unit_of_two_levels_is_the_rows_to_the_precision_of_fp32(source: Path, tmp_path: Path) -> None:
    """Values of 4 bits do not show so small a change."""
    engine = built(source, tmp_path / "engine", "w4a8 gptq")

    def wider(stored: Stored) -> bool:
        stored.own(DOWN)["scales"][5] *= 1.0001
        return True

    with patch.dict(FAULTS, {"a unit x 1.0001": wider}):
        planted(engine, tmp_path / "planted", "a unit x 1.0001")
    (one,) = compared(tmp_path / "planted", source).differences
    assert one.name.startswith(DOWN)


def test_a_small_value_of_e4m3_is_judged_by_the_gap_there(source: Path, tmp_path: Path) -> None:
    """One step of a value near 0 is far less than a step of the row's largest."""
    engine = built(source, tmp_path / "engine", "w8a8-fp8")

    def stepped(stored: Stored) -> bool:
        row = stored.own(DOWN)["weight"][5].view(torch.uint8)
        small = ((row & 127) > 30) & ((row & 127) < 80)
        row[int(small.nonzero()[0])] += 1
        return True

    with patch.dict(FAULTS, {"a small value one step off": stepped}):
        planted(engine, tmp_path / "planted", "a small value one step off")
    (one,) = compared(tmp_path / "planted", source).differences
    assert (one.name, one.measure) == (f"{DOWN}.weight", "value")


@pytest.mark.parametrize("scheme", ["w8a16 awq", "w8a8 smoothquant"])
def test_layer_norms_are_divided_with_their_biases(scheme: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "gpt2")
    engine = built(source, tmp_path / "engine", scheme)
    assert compared(engine, source).differences == ()

    def quieter(stored: Stored) -> bool:
        stored.tensors["layers.0.input_layernorm.bias"] *= 0.98
        return True

    with patch.dict(FAULTS, {"a quieter bias": quieter}):
        planted(engine, tmp_path / "planted", "a quieter bias")
    assert [one.name for one in compared(tmp_path / "planted", source).differences] == [
        "layers.0.input_layernorm.bias"
    ]


def test_a_shift_is_what_zeros_add(source: Path, tmp_path: Path) -> None:
    """A bias that is in its own tensor alone, and not in what RPTQ adds."""

    def without(stored: Stored) -> bool:
        stored.tensors[f"{QKV}.shift"] -= stored.tensors[f"{QKV}.bias"].float()
        return True

    engine = built(source, tmp_path / "engine", "rptq-w8a8")
    with patch.dict(FAULTS, {"no bias in the shift": without}):
        planted(engine, tmp_path / "planted", "no bias in the shift")
    first, *rest = compared(tmp_path / "planted", source).differences
    assert (first.name, first.measure, rest) == (f"{QKV}.weight", "shift", [])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sound_engines_of_every_architecture(kind: str, dtype: str, tmp_path: Path) -> None:
    """In the checkpoint's dtype and another, with a head in fewer bits, and of some of the layers."""
    source = write_source(tmp_path / "source", kind, seed=3)
    for number, quant in enumerate((QuantConfig(), QuantConfig("w8a16", head="w8a16"))):
        engine = built(source, tmp_path / f"e{number}", "dense", dtype, quant=quant, layers="1:2")
        assert compared(engine, source).differences == ()


def test_a_difference_has_figure_and_limit(source: Path, tmp_path: Path) -> None:
    engine = built(source, tmp_path / "engine", "w8a16")
    planted(engine, tmp_path / "planted", "scales x 1.05")
    first = compared(tmp_path / "planted", source).differences[0]
    assert first.name == f"{DOWN}.weight"
    assert first.share > 90
    assert first.text.startswith(f"{DOWN}.weight: scale off by ")
    assert first.text.endswith(" 64 of 64 rows")


def louder(function: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    """A packer whose scales are 5 % too large for weights of one width."""

    def packs(self: LinearScheme, *values: Any) -> dict[str, torch.Tensor]:
        found = function(self, *values)
        return found | {"scales": found["scales"] * 1.05} if values[0].values.shape[1] == 128 else found

    return packs


def test_a_packer_with_wrong_scales_builds_nothing(source: Path, tmp_path: Path) -> None:
    engine = built(source, tmp_path / "engine", "w8a16")
    kept = (engine / "weights.safetensors").read_bytes()
    with (
        patch.object(WeightOnly, "_stored_values", louder(WeightOnly._stored_values)),
        pytest.raises(BuildError, match="so the build was discarded") as failed,
    ):
        built(source, engine, "w8a16", force=True, proof=True)
    assert f"{DOWN}.weight: scale off by" in str(failed.value.seen)
    assert str(failed.value.seen).endswith("; and 3 more")
    assert (engine / "weights.safetensors").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_without_a_proof_is_not_compared(source: Path, tmp_path: Path) -> None:
    with patch.object(WeightOnly, "_stored_values", louder(WeightOnly._stored_values)):
        engine = built(source, tmp_path / "engine", "w8a16")
    assert {one.measure for one in compared(engine, source).differences} == {"scale", "value"}


def backwards(name: str) -> Callable[..., torch.Tensor]:
    def build(self: rules.Concat, target: str, sources: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(sources[::-1] if name in target else sources, self.dim)

    return build


MAPS: dict[str, tuple[str, type, Callable[..., torch.Tensor], str]] = {
    "q, k and v in a wrong order": ("llama", rules.Concat, backwards("qkv"), "layers.0.self_attn.qkv_proj"),
    "gate and up exchanged": ("llama", rules.Concat, backwards("gate_up"), "layers.0.mlp.gate_up_proj"),
    "one is not added": ("gemma2", rules.PlusOne, lambda s, t, x: x[0].float(), "layers.0.input_layernorm"),
    "a square matrix not transposed": (
        "gpt2",
        rules.Transpose,
        lambda s, t, x: x[0] if x[0].shape[0] == x[0].shape[1] else x[0].t(),
        "layers.0.self_attn.o_proj",
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_wrong_weight_map_builds_nothing(name: str, tmp_path: Path) -> None:
    kind, rule, wrong, tensor = MAPS[name]
    source = write_source(tmp_path / "source", kind)
    for scheme in ("dense", "w4a16"):
        with patch.object(rule, "build", wrong), pytest.raises(BuildError) as failed:
            built(source, tmp_path / "engine", scheme, proof=True)
        assert f"{tensor}.weight" in str(failed.value.seen)


def test_figures_are_in_the_proof(source: Path, tmp_path: Path) -> None:
    engine = built(source, tmp_path / "engine", "w4a16", proof=True)
    proof = read_proof(engine)
    assert proof is not None
    figures = proof.claims.source
    assert figures is not None
    assert (figures.tensors, figures.unknown) == (17, False)
    copied, rounded = figures.kinds
    assert (copied.kind, copied.tensors, copied.worst, copied.at) == ("copied", 9, {"copied": 0.0}, {})
    assert (rounded.kind, rounded.tensors) == ("w4a16 round", 8)
    assert set(rounded.worst) == {"scale", "range", "value"}
    assert 0.9 < rounded.worst["value"] <= 1
    assert figures == compared(engine, source).figures
    assert len(figures.errors) == 8
    assert len(json.dumps(figures.replace(errors={}).to_json())) < 600


@pytest.fixture(scope="module")
def engine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("verified") / "engine", "w8a16", proof=True)


class TestVerify:
    def other(self, source: Path, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = Path(shutil.copytree(source, tmp_path / "other"))
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def test_of_its_source(self, engine: Path, source: Path) -> None:
        shown = ingot("verify", engine, "--source", source, "--device", "cpu")
        assert shown.exit_code == 0, shown.stdout
        assert "17 tensors compared with the checkpoint, largest deviation 0.9" in shown.stdout
        assert "source" not in ingot("verify", engine, "--device", "cpu").stdout

    def test_of_another_of_its_shape(self, engine: Path, source: Path, tmp_path: Path) -> None:
        name = "model.layers.1.self_attn.o_proj.weight"
        other = self.other(source, tmp_path, lambda t: t.update({name: 1.02 * t[name]}))
        found = verify(engine, "cpu", source=other, note=False)
        assert found.verdict == "failed"
        assert {(f.kind, f.name) for f in found.failures} == {("source", name.removeprefix("model."))}
        assert ingot("verify", engine, "--source", other, "--device", "cpu").exit_code == 1

    def test_a_tensor_is_missing(self, engine: Path, source: Path, tmp_path: Path) -> None:
        name = "model.layers.1.self_attn.o_proj.weight"
        other = self.other(source, tmp_path, lambda t: t.__delitem__(name))
        shown = ingot("verify", engine, "--source", other, "--device", "cpu")
        assert (shown.exit_code, name in shown.stderr) == (2, True)

    def test_another_model(self, engine: Path, tmp_path: Path) -> None:
        other = write_source(tmp_path / "llama", "llama", num_hidden_layers=1)
        shown = ingot("verify", engine, "--source", other, "--device", "cpu")
        assert shown.exit_code == 2
        assert "architecture llama, num_layers 1" in shown.stderr
        assert "--source" in shown.stderr

    def test_no_checkpoint(self, engine: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError):
            verify(engine, "cpu", source=tmp_path, note=False)


def test_every_architecture_has_its_published_names() -> None:
    by_their_maps = {"pictures"}  # which the comparison says
    assert {one.name for one in ARCHITECTURES} <= set(TABLES) | by_their_maps
    made = made_of(OPENAI, "layers.1.encoder_attn.kv_proj", first_layer=2)
    assert made is not None
    assert made.modules == ("decoder.blocks.3.cross_attn.key", "decoder.blocks.3.cross_attn.value")
    encoder = made_of("whisper", "encoder.layers.1.mlp.up_proj", first_layer=2)
    assert encoder is not None
    assert encoder.modules == ("encoder.layers.1.fc1",)


PACKINGS = [
    Packing("gptq"),
    Packing("gptq", symmetric=False, act_order=True),
    Packing("gptq_v2", 8, 0, symmetric=False),
    Packing("awq", symmetric=False),
    Packing("pack", symmetric=False),
    Packing("pack", 8, act_order=True),
    Packing("int", 8, 0, activations="static"),
]


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.label)
def test_packed_layers_are_taken_as_they_are(packing: Packing, tmp_path: Path) -> None:
    written = write_packed(tmp_path / "packed", packing)
    form = Form.of(written.folder, ["config.json"])
    assert form is not None
    stored = load_file(written.folder / "model.safetensors")
    for module, weight in written.weights.items():
        pieces = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{module}.")}
        assert torch.equal(meant(form, pieces), weight)
    engine = build(written.folder, tmp_path / "engine", device="cpu", proof=False)
    sound = compared(engine, written.folder)
    assert sound.differences == ()
    assert {kind.kind.partition(" ")[2] for kind in sound.figures.kinds} == {"", "stored"}
    for fault in ("one scale x 1.02", "q and k swapped", "another layer's weight"):
        planted(engine, tmp_path / "planted", fault)
        assert compared(tmp_path / "planted", written.folder).differences, fault
    if packing.activations == "static":
        save_file(
            {n: 2 * t if n.endswith("input_scale") else t for n, t in stored.items()},
            written.folder / "model.safetensors",
        )
        assert {one.measure for one in compared(engine, written.folder).differences} == {"input scale"}


def odd_weights(rows: int, columns: int, seed: int) -> Iterator[torch.Tensor]:
    """Zeros, outliers, rows so small that fp16 holds their scales in few digits, and one-sided ranges."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(rows, columns, generator=generator)
    yield plain * torch.logspace(-5, 2, rows)[:, None]
    yield torch.where(plain > 2, 30 * plain, plain)
    yield plain.abs() * torch.where(torch.arange(rows) % 2 == 0, 1, -1)[:, None]
    yield plain.masked_fill(torch.arange(columns) % 3 == 0, 0).index_fill(0, torch.tensor([0, 5]), 0)
    yield (plain * 4).round() / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "scheme",
    [
        WeightOnly(8),
        WeightOnly(4, 32, symmetric=False),
        WeightOnly(4, 0, symmetric=True),
        WeightOnly(4, 64, symmetric=True),
        Int8Both(),
        Int4InInt8(64),
    ],
    ids=lambda s: f"{s.name}-{getattr(s, 'group', 0)}-{getattr(s, 'symmetric', True)}",
)
def test_rounding_of_odd_weights_is_within_its_limits(scheme: LinearScheme, dtype: torch.dtype) -> None:
    for seed, columns in ((0, 96), (1, 150)):
        linear = Linear.__new__(Linear)
        torch.nn.Module.__init__(linear)
        linear.in_features, linear.out_features, linear.scheme = columns, 40, scheme
        for weight in odd_weights(40, columns, seed):
            cast = weight.to(dtype)
            off = judge_narrow(linear, "round", scheme.pack(cast), Known(cast), dtype, CPU)
            assert max(off.shares.values()) <= 1, off.shares
