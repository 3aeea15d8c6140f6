"""Faults of half a percent fail in every scheme and dtype, and beside every kind of original; sound engines
are aligned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.layers import rotary
from ingot.measure.align.align_session import Report, align
from ingot.measure.align.diagnosis import explain_first
from ingot.measure.align.trace import STREAM_READERS, run_steps, trace
from ingot.quant.schemes import half_packed, in_panels, weight_only
from ingot.quant.schemes.int8_products import Int8Products
from tests.e2e.faults import SMALL, faulty
from tests.encoders.speech import write_speech
from tests.tiny_models import edit_config, make_model, random_ids, tiny_config

pytestmark = pytest.mark.usefixtures("unexplained")
IDS = random_ids(24, seed=5)
STAGES = {
    "SiLU x 1.005": "layers.0.mlp",
    "attention scale x 1.02": "layers.0.attention",
    "keys of a head x 1.05": "layers.0.attention",
    "norm x 1.01": "layers.0.post_norm",
    "rotary base x 1.01": "layers.0.attention",
}
SCHEMES: dict[str, str | QuantConfig] = {
    "dense": "none",
    "w8a16": "w8a16",
    "w4a16": QuantConfig("w4a16", 32),
    "w8a8": "w8a8",
    "w8a8 static": QuantConfig("w8a8", activations="static"),
    "w4a8": QuantConfig("w4a8"),
    "rptq-w8a8": QuantConfig("rptq-w8a8", 32),
    "rptq-w4a4": QuantConfig("rptq-w4a4", 32),
}
OFTEN = ("dense", "w8a16", "w4a16", "w8a8")  # `make test-all` has the others, too
SLOW = [name for name in SCHEMES if name not in OFTEN]
WEIGHT_ONLY = {"w8a16": SMALL[:2], "w4a16": SMALL[2:]}  # as dense but for their weights: each has some
GRID = [
    pytest.param(
        scheme,
        fault,
        marks=() if scheme in OFTEN and fault in WEIGHT_ONLY.get(scheme, SMALL) else pytest.mark.slow,
    )
    for scheme in SCHEMES
    for fault in SMALL
]
SOUND = [pytest.param(scheme, marks=pytest.mark.slow if scheme in SLOW else ()) for scheme in SCHEMES]


@pytest.fixture(scope="module")
def engines(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """engines("llama", "w8a8"): built once, in bf16."""
    root = tmp_path_factory.mktemp("engines")
    samples = root / "ids.jsonl"
    samples.write_text("".join(f'{{"token_ids": {random_ids(60, seed=n)}}}\n' for n in range(6)))

    def made(kind: str, scheme: str) -> Path:
        folder, quant = root / f"{kind} {scheme}", SCHEMES[scheme]
        if not folder.exists():
            needs = isinstance(quant, QuantConfig) and quant.calibrated
            given = {"calib": samples, "calib_samples": 6} if needs else {}
            build(originals[kind], folder, quant=quant, dtype="bf16", device="cpu", proof=False, **given)
        return folder

    return made


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """speech("w8a8"): an engine of a model that hears, built once, in bf16, and its checkpoint."""
    root = tmp_path_factory.mktemp("speech")
    write_speech(root / "checkpoint")

    @functools.cache
    def made(quant: str) -> tuple[Path, Path]:
        options: Any = {"quant": quant, "dtype": "bf16", "device": "cpu", "proof": False}
        return build(root / "checkpoint", root / quant, **options), root / "checkpoint"

    return made


def compared(engine: Path, checkpoint: Path, fault: str | None, **options: Any) -> Report:
    with faulty(fault):
        return align(engine, checkpoint, [IDS], **{"steps": 1, "device": "cpu", **options})


@pytest.mark.parametrize("scheme", SOUND)
def test_a_sound_engine_is_aligned(scheme: str, engines: Any, originals: dict[str, Path]) -> None:
    report = compared(engines("llama", scheme), originals["llama"], None)
    assert report.aligned, report.first_stage
    assert max(row.alone.share for row in report.rows if row.alone is not None) < 0.8
    assert {row.eps for row in report.rows} == {3 * 2**-23}  # a GPU's rsqrt and what it is given


@pytest.mark.stays(
    "dense-norm x 1.01",
    "w8a16-SiLU x 1.005",
    "w4a16-keys of a head x 1.05",
    "w8a8-attention scale x 1.02",
    "w8a8-rotary base x 1.01",
)
@pytest.mark.parametrize(("scheme", "fault"), GRID)
def test_in_every_scheme(scheme: str, fault: str, engines: Any, originals: dict[str, Path]) -> None:
    report = compared(engines("llama", scheme), originals["llama"], fault)
    assert report.first_stage == STAGES[fault]
    assert report.first is not None
    assert report.first.alone


def test_a_small_fault_has_its_cause_found(
    engines: Any, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.measure.align.align_session.explain_first", explain_first)
    report = compared(engines("llama", "dense"), originals["llama"], "rotary base x 1.01")
    assert [found.culprit for found in report.findings] == ["rope_base"]
    assert "RoPE runs with base 10100, though the config says 10000" in report.findings[0].text


@pytest.mark.stays("dense-SiLU x 1.005", "w8a8-norm x 1.01")
@pytest.mark.parametrize("fault", ["SiLU x 1.005", "norm x 1.01", "keys of a head x 1.05"])
@pytest.mark.parametrize("scheme", ["dense", "w8a8"])
def test_in_16_bits(scheme: str, fault: str, engines: Any, originals: dict[str, Path]) -> None:
    """No value is off by more than rounding explains; all of them together are."""
    report = compared(engines("llama", scheme), originals["llama"], fault, dtype="bf16")
    assert report.first_stage == STAGES[fault]


@pytest.mark.stays("bf16-w8a8", "fp16-w4a16")
@pytest.mark.parametrize("scheme", OFTEN)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_sound_engine_in_16_bits(scheme: str, dtype: str, engines: Any, originals: dict[str, Path]) -> None:
    report = compared(engines("llama", scheme), originals["llama"], None, dtype=dtype)
    assert report.aligned, report.first_stage


@pytest.mark.stays("norm x 1.01", "rotary base x 1.01")
@pytest.mark.parametrize("fault", SMALL)
def test_qwen_v1_is_not_its_own_judge(fault: str, originals: dict[str, Path]) -> None:
    """No class runs it: the checking decoder does, and shares no code with the modules."""
    report = compared(originals["qwen"], originals["qwen"], fault)
    assert report.reference == "Ingot's checking decoder, fp32"
    assert report.first_stage == STAGES[fault]


def test_the_judge_turns_by_itself(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the code is wrong from which every table of the process is made."""
    own = rotary.frequencies
    monkeypatch.setattr(rotary, "frequencies", lambda *given: own(*given) * 1.002)
    for original in ("hf", "ingot"):
        report = compared(originals["llama"], originals["llama"], None, original=original)
        assert report.first_stage == "layers.0.attention"


@pytest.mark.stays("hf-SiLU x 1.005", "ingot-attention scale x 1.02")
@pytest.mark.parametrize("fault", SMALL[:3])
@pytest.mark.parametrize("original", ["hf", "ingot"])
def test_gpt2(fault: str, original: str, originals: dict[str, Path]) -> None:
    report = compared(originals["gpt2"], originals["gpt2"], fault, original=original)
    assert report.first_stage == STAGES[fault]


@pytest.mark.stays("none-None-None", "none-norm x 1.01-layers.0.post_norm")
@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (None, None),
        ("SiLU x 1.005", "encoder.layers.0.mlp"),
        ("norm x 1.01", "layers.0.post_norm"),
        ("attention scale x 1.02", "layers.0.attention"),
        ("keys of a head x 1.05", "layers.0.attention"),
    ],
)
@pytest.mark.parametrize("quant", ["none", pytest.param("w8a8", marks=pytest.mark.slow)])
def test_whisper(
    fault: str | None, stage: str | None, quant: str, speech: Callable[[str], tuple[Path, Path]]
) -> None:
    engine, checkpoint = speech(quant)
    for original in ("hf", "ingot"):
        with faulty(fault):
            report = align(engine, checkpoint, [[1, 5, 9]], steps=1, device="cpu", original=original)
        assert report.first_stage == stage


@pytest.mark.usefixtures("without_llvmlite")  # whose kernels round by themselves
@pytest.mark.stays("fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_that_are_rounded_down_too_often(
    dtype: str, engines: Any, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.7 on they go up: inputs on the grid come out the same, and the others show it."""
    own = Int8Products.quantize_input

    def down(self: Int8Products, x: torch.Tensor, tensors: Any) -> Any:
        rows = own(self, x, tensors)
        scales = rows.scales.repeat_interleave(rows.group, dim=1) if rows.group else rows.scales[:, None]
        return replace(rows, values=(x / scales + 0.3 * x.sign()).trunc().to(torch.int8))

    monkeypatch.setattr(Int8Products, "quantize_input", down)
    report = compared(engines("llama", "w8a8"), originals["llama"], None, dtype=dtype)
    assert report.first_stage == "layers.0.attention"
    assert report.first is not None
    assert report.first.row.alone is not None
    assert not report.first.row.alone.on_grid


@pytest.mark.usefixtures("weights_as_stored")
def test_a_weight_that_is_unpacked_wrong(
    engines: Any, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference unpacks it by other code."""
    own = weight_only.dequantized
    monkeypatch.setattr(weight_only, "dequantized", lambda *given: own(*given) * 1.005)
    report = compared(engines("llama", "w4a16"), originals["llama"], None)
    assert report.first_stage == "layers.0.attention"


@pytest.mark.usefixtures("without_llvmlite")
@pytest.mark.parametrize(("scheme", "name"), [("w4a16", "dequantized"), ("w8a16", "unpacked")])
def test_a_weight_that_is_packed_wrong_for_a_cpu(
    scheme: str, name: str, engines: Any, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference reads the engine's file, not what is packed."""
    own = getattr(half_packed, name)
    monkeypatch.setattr(half_packed, name, lambda *given: own(*given) * 1.005)
    report = compared(engines("llama", scheme), originals["llama"], None)
    assert report.first_stage == "layers.0.attention"


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_a_weight_whose_panels_are_wrong(
    scheme: str, engines: Any, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two columns are exchanged."""
    own = in_panels.packed_values

    def exchanged(values: torch.Tensor, *kind: Any, **options: Any) -> torch.Tensor:
        return own(torch.cat((values[:, :2].flip(1), values[:, 2:]), dim=1), *kind, **options)

    monkeypatch.setattr(in_panels, "packed_values", exchanged)
    report = compared(engines("llama", scheme), originals["llama"], None)
    assert report.first_stage == "layers.0.attention"


def test_an_epsilon_below_the_rounding_of_16_bits(originals: dict[str, Path], tmp_path: Path) -> None:
    """Config and weights are held to the original in fp32, whatever the engine computes in."""
    engine = build(originals["llama"], tmp_path / "engine", dtype="bf16", device="cpu", proof=False)
    other = make_model(tiny_config("llama"), seed=1)
    other.save_pretrained(tmp_path / "other")
    edit_config(tmp_path / "other", rms_norm_eps=1e-5)
    assert compared(engine, originals["llama"], None, dtype="bf16").aligned
    report = compared(engine, tmp_path / "other", None, dtype="bf16")
    assert report.first_stage == "layers.0.input_norm"
    assert report.first is not None
    assert report.first.row.alone is not None
    assert report.first.row.alone.of_config


def test_a_trace_without_the_places_inside(originals: dict[str, Path], tmp_path: Path) -> None:
    """As older ones are: attention and MLP are judged as a whole."""
    model, path = make_model(tiny_config("llama"), seed=1), tmp_path / "trace"
    with trace(model, path, inputs=STREAM_READERS):
        run_steps(model, IDS, 1)
    for fault in (None, *SMALL[:2]):
        with faulty(fault):
            report = align(originals["llama"], path, device="cpu")
        assert report.first_stage == (None if fault is None else STAGES[fault])
