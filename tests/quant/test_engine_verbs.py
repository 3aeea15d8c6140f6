"""Engines in fewer bits in the terminal: what verbs tell of them, and what cannot be asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError, ConfigError
from ingot.kernels.cpu.panel_products import Panels, panel_product
from ingot.kernels.rows.int8_rows import Int8Weight, int8_product
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, other_spec
from ingot.memory.memory_sizes import weight_bytes
from ingot.proof.verify_engine import verify
from ingot.quant.schemes import half_packed, in_panels, int4_in_int8, int8_products
from tests.e2e.terminal import ingot
from tests.quant.conftest import Made
from tests.support.shown_errors import raises_shown

NARROW = QuantConfig("w4a16", 32, method="gptq")
SMOOTHED = ("--method", "smoothquant", "--alpha", "search", "--activations", "static", "--calib", "{samples}")
BUILDS = {  # flags, and what `inspect` says
    "mixed": (
        ("--quant", "{mixed}", "--group-size", "64", "--quant-head"),
        (
            "w4a16+w8a16, head w8a16, one scale per 64 columns, asymmetric, by rounding",
            "by rounding, 1 layer pattern over w4a16 layers.1.mlp.down_proj: w8a16 ",
            "layers.0.mlp.down_proj.words",
        ),
    ),
    "w8a8": (
        ("--quant", "w8a8", "--weight-scales", "tensor"),
        ("w8a8, dynamic activations, one weight scale per layer, by rounding",),
    ),
    "w4a8": (
        ("--quant", "w4a8", "--group-size", "64", "--no-rotate"),
        ("w4a8, one inner scale per 64 columns, not rotated, dynamic activations, by rounding",),
    ),
    "smoothed": (
        ("--quant", "w8a8", *SMOOTHED),
        ("w8a8, static activations, by SmoothQuant with alpha search", "12 samples, 720 tokens"),
    ),
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text("scheme: w4a16\nlayers:\n  layers.1.mlp.down_proj: w8a16\n")
    return path


@pytest.mark.stays("w8a8", "w4a8")
@pytest.mark.parametrize("name", BUILDS)
def test_build_inspect_and_plan(
    checkpoints: dict[str, Path], samples: Path, mixed: Path, tmp_path: Path, name: str
) -> None:
    flags, words = BUILDS[name]
    given = [flag.format(mixed=mixed, samples=samples) for flag in flags]
    engine, source = tmp_path / "engine", checkpoints["llama"]
    done = ingot("build", source, "-o", engine, *given, "--no-proof", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    text = " ".join(ingot("inspect", engine, "--tensors").stdout.split())
    assert [word for word in words if word not in text] == []
    reported = json.loads(ingot("inspect", engine, "--json").stdout)["quant"]
    assert reported == Manifest.read(engine).quant.to_json()
    planned = ingot("plan", source, "--quant", reported["scheme"], "--gpu", "24GiB")
    assert (planned.exit_code, reported["scheme"] in planned.stdout) == (0, True)


MISUSE = {  # flags of `build`, and words of its error
    "--quant w3": "--quant w8a16 w4a16",
    "--quant w4a16 --group-size 48": "--group-size 128",
    "--quant w8a16 --group-size 64": "--group-size",
    "--group-size 64": "--group-size",
    "--quant w8a16 --asymmetric": "--asymmetric",
    "--quant nowhere.yaml": "--quant nowhere.yaml",
    "--quant {typo} --device cpu": "dwon_proj --quant: layers",
    "--quant w8a16 --activations static": "--activations w8a8",
    "--quant w8a8 --activations warm": "--activations static",
    "--quant w8a8 --alpha 0.5": "--alpha smoothquant",
    "--quant w8a8 --method smoothquant --alpha two": "--alpha search",
    "--quant w8a8 --method smoothquant": "--calib",
    "--quant w8a8 --activations static": "--calib",
    "--quant w8a8 --calib x.jsonl": "--activations static --calib",
    "--quant w8a8 --weight-scales row": "--weight-scales tensor",
    "--quant w4a8 --group-size 32": "--group-size 64, 128",
    "--quant w4a8 --symmetric": "--asymmetric False",
    "--quant w4a8 --activations static": "--activations dynamic",
    "--quant w4a8 --method awq": "--method gptq",
    "--quant w4a8 --method gptq": "--calib",
    "--quant w8a8 --rotate": "--rotate w8a8 w4a8",
    "--method gptq": "--method --quant",
    "--method gptq --quant-head": "--method --quant",
    "--quant w4a16 --method magic": "--method round gptq",
    "--quant w4a16 --method gptq": "--calib FILE",
    "--quant w4a16 --calib-samples 8": "--calib-samples 8 --method gptq",
    "--quant w4a16 --calib chats.jsonl": "--calib chats.jsonl --method gptq",
    "--quant w4a16 --method gptq --calib nowhere.jsonl": "--calib nowhere",
}


@pytest.mark.parametrize("flags", MISUSE)
def test_misuse(checkpoints: dict[str, Path], tmp_path: Path, flags: str) -> None:
    (tmp_path / "typo.yaml").write_text('scheme: w4a16\nlayers: {"*.dwon_proj": w8a16}\n')
    words = flags.format(typo=tmp_path / "typo.yaml").split()
    done = ingot("build", checkpoints["llama"], "-o", tmp_path / "engine", *words)
    assert (done.exit_code, (tmp_path / "engine").exists()) == (2, False)
    assert [word for word in MISUSE[flags].split() if word not in done.stderr] == []


REFUSED: list[tuple[QuantConfig, dict[str, Any], str]] = [
    (
        QuantConfig("w8a16", layers={"layers.*.mlp.dwon_proj": "none"}),
        {},
        r"match no linear layer.*dwon_proj.*down_proj",
    ),
    (QuantConfig("w8a8", activations="static"), {}, r"needs calibration.*activations static.*--calib FILE"),
    (NARROW, {}, r"seen: method gptq.*--calib FILE"),
    (NARROW.replace(method="awq"), {}, r"seen: method awq.*--calib FILE"),
    (QuantConfig("w4a16"), {"calib": "{samples}"}, r"this build uses no calibration data.*--method gptq"),
    (NARROW, {"calib": "{samples}", "calib_samples": 0}, r"seen: 0 samples.*--calib-samples"),
    (NARROW, {"calib": "{texts}"}, r"needs a tokenizer.*token_ids.*--calib"),
]


@pytest.mark.parametrize(("quant", "options", "reported"), REFUSED)
def test_what_cannot_be_built(
    checkpoints: dict[str, Path],
    samples: Path,
    tmp_path: Path,
    quant: QuantConfig,
    options: dict[str, Any],
    reported: str,
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Good news."}\n')
    if "calib" in options:
        options = options | {"calib": options["calib"].format(samples=samples, texts=texts)}
    with raises_shown(ConfigError, reported):
        build(checkpoints["llama"], tmp_path / "engine", quant=quant, device="cpu", **options)
    assert not (tmp_path / "engine").exists()


def test_what_cannot_be_built_in_memory(checkpoints: dict[str, Path]) -> None:
    flags = r"ingot build .* --quant w4a16 --method {} --calib FILE"
    for quant, reported in (
        (NARROW, r"GPTQ needs calibration.*seen: method gptq.*" + flags.format("gptq")),
        (NARROW.replace(method="awq"), r"AWQ needs calibration.*" + flags.format("awq")),
        (
            QuantConfig("w8a8", activations="static"),
            r"a static scale needs calibration.*--activations static",
        ),
    ):
        for call in (LLM, LLM.from_config):
            with raises_shown(ConfigError, reported):
                call(checkpoints["llama"], device="cpu", quant=quant)


def test_an_engine_keeps_its_scheme(made: Made, tmp_path: Path) -> None:
    folder = made("llama", "w8a16")
    with pytest.raises(ConfigError, match=r"fixed .*seen: \['quant'\].*own, quantization w8a16.*quant …`"):
        LLM(folder, "cpu", quant="w4a16")
    with pytest.raises(CheckpointError, match=r"is an engine, not a checkpoint.*give the checkpoint"):
        build(folder, tmp_path / "other", quant="w4a16", device="cpu")


def test_layer_norms_are_not_rotated(checkpoints: dict[str, Path], made: Made) -> None:
    for call in (lambda: made("gpt2", "w4a8"), lambda: LLM(checkpoints["gpt2"], "cpu", quant="w4a8")):
        with pytest.raises(ConfigError, match=r"layer_norm.*rotation=False"):
            call()


def _zeros_off_by_one(weight: StoredWeight, integers: Any = half_packed._integers) -> torch.Tensor:
    zeros = None if weight.zeros is None else weight.zeros + 1
    return integers(dataclasses.replace(weight, zeros=zeros))  # type: ignore[no-any-return]


def _scales_of_other_rows(x: Any, weight: Int8Weight, *rest: Any) -> torch.Tensor:
    return int8_product(x, dataclasses.replace(weight, scales=weight.scales.roll(1)), *rest)


def _panels_of_other_rows(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    return panel_product(x, dataclasses.replace(panels, scales=panels.scales.roll(1, -1)))


def _steps_of_other_rows(weight: Any, expand: Any = int4_in_int8.expanded) -> Int8Weight:
    found = expand(weight)
    return Int8Weight(found.values.roll(1, dims=0), found.scales)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("quant", ["w8a16", "w8a8"])
def test_a_wrong_product_of_panels_is_named(made: Made, monkeypatch: pytest.MonkeyPatch, quant: str) -> None:
    folder = made("llama", quant, proof=True)
    monkeypatch.setattr(in_panels, "panel_product", _panels_of_other_rows)
    found = verify(folder, "cpu", note=False)
    assert (found.verdict, found.first_bad_module) == ("failed", "layers.0.self_attn")


@pytest.mark.usefixtures("without_llvmlite")
@pytest.mark.parametrize(
    ("quant", "place", "name", "wrong"),
    [
        ("w4a16", half_packed, "_integers", _zeros_off_by_one),
        ("w8a8", int8_products, "multiply", _scales_of_other_rows),
        ("w4a8", int4_in_int8, "expanded", _steps_of_other_rows),
    ],
)
def test_a_wrong_product_is_named(
    made: Made, monkeypatch: pytest.MonkeyPatch, quant: str, place: Any, name: str, wrong: Callable[..., Any]
) -> None:
    folder = made("llama", quant, proof=True)
    monkeypatch.setattr(place, name, wrong)
    found = verify(folder, "cpu", note=False)
    assert (found.verdict, found.first_bad_module) == ("failed", "layers.0.self_attn")


def test_seven_b_in_bytes() -> None:
    """A 7B's attention and MLP: a byte and half a byte a weight, and the scales."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 2, "num_heads": 32}
    shape = {"vocab_size": 1000, "num_kv_heads": 32, "head_dim": 128, "max_positions": 64}
    config = DecoderConfig("llama", rope=RopeConfig(dim=128), **sizes, **shape)
    rows = 4 * 4096 + 2 * 11008 + 4096
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    expected = {
        "none": 2 * weights,
        "w8a16": weights + 2 * rows,
        "w4a16": weights // 2 + weights // 128 * 3,
    }
    for quant, size in expected.items():
        found = weight_bytes(config, QuantConfig(quant), torch.float16)
        assert (found["attention"] + found["mlp"]) // 2 == size


def test_only_the_first_side_of_an_evaluation_is_quantized(checkpoints: dict[str, Path]) -> None:
    path = str(checkpoints["llama"])
    one = SideSpec(path, device="cpu", quant="w8a16")
    with open_side(one) as quantized, open_side(other_spec(one, path, "auto", 1)) as dense:
        assert [side.facts()["quantization"] for side in (quantized, dense)] == ["w8a16", "none"]
        assert not torch.equal(quantized.logits([1, 2, 3]), dense.logits([1, 2, 3]))
