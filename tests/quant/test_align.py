"""An engine in fewer bits is held to its own weights, not to those that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM
from ingot.building.dequantized import write_dequantized
from ingot.building.int8_inputs import Int8Input, rounding
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import CheckpointError
from ingot.layers.linear import linears
from ingot.measure.align.align_report import facts
from ingot.measure.align.align_session import align
from ingot.measure.align.trace import run_steps, trace
from ingot.proof.verify_engine import verify
from tests.quant.conftest import Made
from tests.support.shown_errors import raises_shown
from tests.tiny_models import make_model, random_ids, tiny_config

AWQ = QuantConfig("w4a16", 64, symmetric=True, method="awq", layers={"*.qkv_proj": "none"})
MIXED = QuantConfig("w4a16", 32, head="w8a16", layers={"*.o_proj": "none", "layers.1.*": "w8a16"})


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen", "gpt2"])
def test_a_dequantized_checkpoint_has_the_engines_weights(
    checkpoints: dict[str, Path], made: Made, kind: str, tmp_path: Path
) -> None:
    engine = made(kind, MIXED, dtype="fp32")
    folder = write_dequantized(engine, checkpoints[kind], tmp_path / "dequantized")
    ours, theirs = LLM(engine, "cpu"), LLM(folder, "cpu")
    for name, linear in linears(theirs.engine.model).items():
        own = linears(ours.engine.model)[name]
        assert torch.equal(linear.dequantized(torch.float32), own.dequantized(torch.float32)), name
    ids = random_ids(12)
    torch.testing.assert_close(ours.logits(ids), theirs.logits(ids), rtol=1e-4, atol=1e-4)


def test_of_some_layers(checkpoints: dict[str, Path], made: Made, tmp_path: Path) -> None:
    engine = made("llama", "w8a16", layers="1:2")
    folder = write_dequantized(engine, checkpoints["llama"], tmp_path / "dequantized")
    ours, theirs = LLM(engine, "cpu"), LLM(folder, "cpu", layers="1:2")
    ids = random_ids(12)
    torch.testing.assert_close(ours.logits(ids), theirs.logits(ids), rtol=1e-4, atol=1e-4)


def test_our_own_path_rounds_no_dequantized_weight(
    checkpoints: dict[str, Path], made: Made, tmp_path: Path
) -> None:
    """Also where most values of the original are of 16 bits, and stay: Qwen v1, which no class runs."""
    engine = made("qwen", QuantConfig("w8a16"), dtype="auto")
    folder = write_dequantized(engine, checkpoints["qwen"], tmp_path / "dequantized")
    ours = linears(LLM(folder, "cpu", compute_dtype="fp32").engine.model)
    for name, linear in linears(LLM(engine, "cpu").engine.model).items():
        assert torch.equal(ours[name].dequantized(torch.float32), linear.dequantized(torch.float32))
    assert align(engine, checkpoints["qwen"], [random_ids(9)], steps=1, device="cpu").aligned


def test_without_fewer_bits_nothing_is_reported(checkpoints: dict[str, Path], made: Made) -> None:
    report = align(made("llama", "none"), checkpoints["llama"], [random_ids(5)], steps=0, device="cpu")
    assert report.quant is None
    assert "quantized" not in dict(facts(report))


@pytest.mark.stays("hf")
@pytest.mark.parametrize("original", ["hf", "ingot"])
def test_activations_in_8_bits_have_a_floor(checkpoints: dict[str, Path], made: Made, original: str) -> None:
    prompts, options = [random_ids(9), random_ids(21, seed=2)], {"steps": 2, "device": "cpu"}
    engine, folder = made("llama", "w8a8"), checkpoints["llama"]
    reports = [align(one, folder, prompts, original=original, **options) for one in (engine, folder)]
    assert all(report.aligned for report in reports)
    rounded, exact = (max(row.floor for row in report.rows) for report in reports)
    assert exact < rounded < 0.2


@pytest.mark.stays("llama-w8a8", "gpt2-awq")
@pytest.mark.parametrize("quant", [MIXED, QuantConfig("w8a8"), AWQ], ids=["w4a16", "w8a8", "awq"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_is_aligned_in_16_bits(
    checkpoints: dict[str, Path], made: Made, kind: str, quant: QuantConfig
) -> None:
    """In the engine's own arithmetic; `test_engines.py` aligns every scheme in fp32."""
    options = {"steps": 2, "device": "cpu", "dtype": "bf16"}
    report = align(made(kind, quant, dtype="bf16"), checkpoints[kind], [random_ids(9)], **options)
    assert report.aligned, report.first_stage


@pytest.mark.stays("hf-w8a8", "ingot-w8a16")
@pytest.mark.parametrize("quant", ["w8a16", "w8a8"])
@pytest.mark.parametrize("original", ["hf", "ingot"])
def test_wrong_scales_are_found(
    checkpoints: dict[str, Path], made: Made, quant: str, original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by 2 %, or of other rows."""
    engine, stored = made("llama", quant), LLM.__init__

    def damaged(self: LLM, *args: object, **options: object) -> None:
        stored(self, *args, **options)  # type: ignore[arg-type]
        down = self.engine.model.layers[1].mlp.down_proj
        if not down.origin.dense:
            scales = down._parameters.get("scales", getattr(down.scheme, "panels", down).scales)
            scales.copy_(scales * 1.02 if quant == "w8a16" else scales.roll(1, -1))

    monkeypatch.setattr(LLM, "__init__", damaged)
    report = align(engine, checkpoints["llama"], [random_ids(9)], steps=0, device="cpu", original=original)
    assert report.first_stage == "layers.1.mlp"


def test_a_trace_has_another_stream(made: Made, tmp_path: Path) -> None:
    model, place = make_model(tiny_config("llama"), seed=3), tmp_path / "trace"
    with trace(model, place):
        run_steps(model, random_ids(6), 1)
    turned, plain = (made("llama", QuantConfig("w4a8", 64, rotation=on), str(on)) for on in (True, False))
    reported = r"a trace holds the original's hidden states.*--reference CHECKPOINT"
    with raises_shown(CheckpointError, reported):
        align(turned, place, device="cpu")
    assert "differences are expected" in str(align(plain, place, device="cpu").quant)


def test_a_class_without_the_product_is_refused() -> None:
    one = Int8Input("layers.0.mlp.down_proj", ("model.layers.0.mlp.down_proj",), 0, None)
    with pytest.raises(CheckpointError, match=r"no such linear layer.*down_proj.*original=ingot"):  # noqa: SIM117
        with rounding(torch.nn.Linear(2, 2), [one]):
            pass


@pytest.mark.parametrize("method", ["round", "awq"])
def test_inputs_of_23_bits_are_noise(
    checkpoints: dict[str, Path], made: Made, method: str, cpu_kernels: None
) -> None:
    """An engine on a CPU that splits inputs of products is proven and aligned."""
    dtype = "auto" if method == "round" else "bf16"
    engine = made("mistral", QuantConfig("w8a16", method=method), dtype=dtype, proof=True)
    assert verify(engine, "cpu", note=False).verdict == "proven"
    options = {"steps": 2, "device": "cpu", "original": "ingot"}
    report = align(engine, checkpoints["mistral"], [random_ids(19)], **options)
    assert report.aligned, report.first_stage
