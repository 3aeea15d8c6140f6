"""Engines whose numbers or scales samples chose: the same bytes again, in the right layers, and nearer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.building.calibration import input_statistics
from ingot.building.calibration.calibration_cache import cache_path
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly
from ingot.engine.engine_diff import compare_engines
from ingot.engine.manifest import Manifest
from ingot.errors import BuildError, OutOfMemoryError
from ingot.layers.linear import linears
from ingot.quant.schemes import weight_only
from tests.e2e.terminal import ingot
from tests.quant.conftest import Made
from tests.quant.models import divergence
from tests.quant.pocket import POCKET, Pocket
from tests.support.shown_errors import raises_shown
from tests.tiny_models import make_model, random_ids, tiny_config

GPTQ = QuantConfig("w4a16", 32, method="gptq")
SMOOTH = QuantConfig("w8a8", method="smoothquant")
STATIC = QuantConfig("w8a8", activations="static")
MIXED = QuantConfig(
    "w4a16",
    64,
    symmetric=True,
    head="w8a16",
    method="gptq",
    layers={"*.o_proj": "none", "layers.1.mlp.*": "w8a16"},
)


@pytest.mark.stays("gptq")
@pytest.mark.parametrize("quant", [MIXED, GPTQ.replace(method="awq")], ids=lambda q: q.method)
def test_the_same_inputs_give_the_same_bytes(
    made: Made, samples: Path, tmp_path: Path, quant: QuantConfig
) -> None:
    elsewhere = Path(shutil.copy(samples, tmp_path / "copied.jsonl"))
    first, second = (made("qwen2", quant, path.stem, calib=path) for path in (samples, elsewhere))
    names = {file.name for file in first.iterdir() if file.is_file()}
    assert "weights.safetensors" in names
    assert [n for n in names if (first / n).read_bytes() != (second / n).read_bytes()] == []
    fewer = made("qwen2", quant, "fewer", calib_samples=3)
    changes = {change.name: (change.left, change.right) for change in compare_engines(first, fewer).config}
    assert changes["calibration.samples"] == (6, 3)


def changed(made: Made, kind: str, quant: QuantConfig) -> set[str]:
    """Tensors that are not those of rounding."""
    chosen, rounded = (
        Manifest.read(made(kind, quant.replace(method=method), method)).tensors
        for method in (quant.method, "round")
    )
    return {name for name in chosen if chosen[name] != rounded[name]}


def test_gptq_leaves_whole_layers_and_the_head_as_rounding_does(made: Made) -> None:
    products = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    found = {name.rpartition(".")[0] for name in changed(made, "tied", MIXED)}
    assert found == {f"layers.{index}.{name}" for index in (0, 1) for name in products}


def test_awq_folds_into_norms_and_what_makes_an_input(made: Made) -> None:
    """Only norms before narrow products, and what makes the inputs of others, change."""
    layers = {"*.qkv_proj": "none", "layers.1.mlp.*": "w8a16"}
    found = changed(made, "gpt2", MIXED.replace(method="awq", layers=layers))
    assert {name.split(".")[0] for name in found} == {"layers"}
    for index in (0, 1):
        own = {name.removeprefix(f"layers.{index}.") for name in found if f".{index}." in name}
        assert {"post_attention_layernorm.weight", "post_attention_layernorm.bias"} <= own
        assert {"self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias"} <= own  # makes o_proj's input
        assert not own & {"input_layernorm.weight", "input_layernorm.bias", "mlp.up_proj.bias"}


def test_gptq_is_nearer_than_rounding(checkpoints: dict[str, Path], made: Made) -> None:
    quant = QuantConfig("w4a16", method="gptq")
    chosen = LLM(made("llama", quant, calib_samples=12), "cpu")
    rounded = LLM(checkpoints["llama"], "cpu", quant="w4a16")
    ids = random_ids(120, seed=99)
    wanted = LLM(checkpoints["llama"], "cpu").logits(ids).log_softmax(-1)
    costs = [divergence(wanted, llm.logits(ids).log_softmax(-1)) for llm in (chosen, rounded)]
    assert costs[0] < 0.8 * costs[1]
    own, other = (linears(llm.engine.model)["layers.0.mlp.down_proj"] for llm in (chosen, rounded))
    assert not torch.equal(own.dequantized(torch.float32), other.dequantized(torch.float32))


def test_awq_is_nearer_than_rounding_where_channels_are_loud(samples: Path, tmp_path: Path) -> None:
    model = make_model(tiny_config("llama", hidden_size=64, intermediate_size=128), seed=3)
    loud = torch.ones(64)
    loud[[3, 40]] = 30.0
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, [getattr(layer.self_attn, f"{n}_proj") for n in "qkv"]),
                (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                norm.weight *= loud
                for reader in readers:
                    reader.weight /= loud
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    chosen = QuantConfig("w4a16", 64, method="awq")
    folder = build(checkpoint, tmp_path / "awq", quant=chosen, calib=samples, device="cpu", proof=False)
    ids = random_ids(120, seed=99)
    wanted = LLM(checkpoint, "cpu").logits(ids).log_softmax(-1)
    near = (LLM(folder, "cpu"), LLM(checkpoint, "cpu", quant=chosen.replace(method="round")))
    costs = [divergence(wanted, llm.logits(ids).log_softmax(-1)) for llm in near]
    assert costs[0] < 0.75 * costs[1]


def test_progress_tells_of_every_layer(made: Made) -> None:
    reported: list[tuple[str, int, int]] = []
    made("llama", GPTQ, progress=lambda *now: reported.append(now))
    assert [what for what, _, _ in reported if what.endswith("mlp.down_proj by GPTQ")] == [
        f"layers.{index}.mlp.down_proj by GPTQ" for index in (0, 1)
    ]
    assert "calibration 100 %" in {what for what, _, _ in reported}
    done = [now for _, now, _ in reported]
    assert done == sorted(done)
    assert done[-1] == reported[-1][2]


def test_a_layer_s_weights_are_read_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk over samples and the folding share them."""
    asked: list[str] = []
    load = Assembly.load

    def counted(self: Assembly, name: str, *given: Any, **named: Any) -> torch.Tensor:
        asked.append(name)
        return load(self, name, *given, **named)

    monkeypatch.setattr(Assembly, "load", counted)
    made("llama", SMOOTH)
    layers = [name for name in asked if name.startswith("layers.")]
    assert len(layers) == len(set(layers)) == 2 * 6


def test_a_second_build_reads_the_ranges_beside_the_engine(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []

    def built(quant: QuantConfig, **changes: object) -> bytes:
        reported.clear()
        options = {"force": True, "progress": lambda what, done, total: reported.append(what)}
        return (made("qwen2", quant, **options, **changes) / "weights.safetensors").read_bytes()

    first = built(STATIC)
    assert "calibration 100 %" in reported
    assert cache_path(tmp_path / "engine").is_file()
    walked = input_statistics.Walk
    monkeypatch.setattr(input_statistics, "Walk", None)
    assert built(STATIC) == first
    assert "ranges of engine.calibration.safetensors" in reported
    built(SMOOTH.replace(alpha=0.7))
    monkeypatch.setattr(input_statistics, "Walk", walked)
    searched = SMOOTH.replace(alpha="search", activations="static")
    for quant, changes in ((searched, {}), (STATIC, {"calib_samples": 5}), (STATIC, {"dtype": "bf16"})):
        built(quant, **changes)
        assert "calibration 100 %" in reported, quant
    assert built(STATIC) == first


def test_a_failed_build_leaves_no_ranges(made: Made, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise BuildError("no", seen="no", fix="no")

    with pytest.raises(BuildError, match="no"):
        made("llama", SMOOTH, finish=fail)
    assert not list(tmp_path.iterdir())


def _zero_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight.data.zero_()


def _huge(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.fill_(3e38)


def _one_huge(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[5, 7] = 3e38


@pytest.mark.parametrize(
    ("quant", "damage", "reported"),
    [
        (GPTQ, _zero_norm, r"layers\.1\.mlp\.gate_up_proj: .*all 0"),
        (SMOOTH, _huge, r"not finite.*layers\.1"),
        (GPTQ.replace(method="awq"), _one_huge, r"layers\.1"),
    ],
)
def test_what_cannot_be_calibrated_names_its_layer(
    samples: Path, tmp_path: Path, quant: QuantConfig, damage: Callable[[Any], None], reported: str
) -> None:
    model = make_model(tiny_config("llama"), seed=3)
    damage(model)
    model.save_pretrained(tmp_path / "checkpoint")
    with raises_shown(BuildError, reported):
        build(tmp_path / "checkpoint", tmp_path / "engine", quant=quant, calib=samples, device="cpu")
    assert not (tmp_path / "engine").exists()


def test_a_device_without_memory(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(weight_only, "gptq", too_large)
    with pytest.raises(OutOfMemoryError, match=r"calibration does not fit.*layers\.0.*device=cpu"):
        made("llama", GPTQ)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("length", "warned"), [(7, True), (40, False)])
def test_fewer_tokens_than_a_model_is_wide_are_warned_of(
    length: int, warned: bool, made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model has 32 channels."""
    calib = tmp_path / "calib.jsonl"
    calib.write_text(json.dumps({"token_ids": list(range(1, 1 + length))}) + "\n", encoding="utf-8")
    made("llama", SMOOTH, calib=calib)
    reported = [r.message for r in caplog.records if "the quantization may overfit them" in r.message]
    assert bool(reported) == warned
    assert all(f"{length} tokens" in one for one in reported)


@pytest.mark.parametrize(
    ("method", "count", "share"), [("gptq", 24, 0.75), pytest.param("awq", 16, 0.9, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_the_verb_on_the_pocket_model(
    pocket: Pocket, tmp_path: Path, method: str, count: int, share: float
) -> None:
    """Conversations through its chat template; nearer than rounding on others of the same kind."""
    folder = tmp_path / "engine"
    flags = ("--quant", "w4a16", "--method", method, "--calib", pocket.calib, "--calib-samples", count)
    done = ingot("build", POCKET, "-o", folder, *flags, "--no-proof", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    text = ingot("inspect", folder).stdout
    assert f"w4a16, one scale per 128 columns, asymmetric, by {method.upper()}" in text
    assert f"{count} samples, " in text
    reported = json.loads(ingot("inspect", folder, "--json").stdout)["calibration"]
    assert (reported["samples"], reported["length"]) == (count, 512)
    assert reported["sha256"] == hashlib.sha256(pocket.calib.read_bytes()).hexdigest()
    assert pocket.cost(LLM(folder, "cpu")) < share * pocket.cost(LLM(POCKET, "cpu", quant="w4a16"))
