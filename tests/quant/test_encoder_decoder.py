"""Whisper in every scheme that needs no samples (of the others: test_calibrated_speech.py): both halves, one
of them, their sizes, what they compute.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_facts import describe
from ingot.engine.engine_loader import setting_of
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError
from ingot.layers import attention, cross_attention, norm
from ingot.layers.linear import held_bytes, linears
from ingot.layers.products import layer_products as products
from ingot.layers.products import row_forms as forms
from ingot.memory.ledger import ledger
from ingot.proof.verify_engine import verify
from ingot.quant.schemes import int8_products
from tests.e2e.terminal import ingot
from tests.encoders.speech import FRAMES, MELS, POSITIONS, write_speech
from tests.parity.kernel_witness import Witness, interpreted
from tests.quant.test_engines import dense_reference
from tests.tiny_models import random_ids

HALVES = {
    "encoder alone": read_quant("encoder=w8a16"),
    "decoder alone": read_quant("decoder=w8a8"),
    "apart": read_quant("encoder=w8a8,decoder=w4a16", group=32, head="w8a16"),
    "kinds of layers": QuantConfig("w8a16", layers={"*.mlp.*": "w8a8", "*.encoder_attn.*": "none"}),
}
SCHEMES = {
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16", 32, head="w8a16"),
    "w4a16 symmetric": QuantConfig("w4a16", symmetric=True),
    "w8a8": QuantConfig("w8a8"),
    "w8a8 by tensor": QuantConfig("w8a8", weight_scales="tensor"),
    "w4a8": QuantConfig("w4a8", rotation=False),
} | HALVES
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder)
    return folder


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> LLM:
    return LLM(checkpoint, "cpu", max_batch_size=4)


def spoken(seed: int, tokens: int, frames: int = FRAMES) -> Prompt:
    features = torch.randn(MELS, frames, generator=torch.Generator().manual_seed(seed))
    return Prompt([Input(features), random_ids(tokens, seed=seed)])


PROMPTS = [spoken(1, 3), spoken(2, 20, 34), spoken(3, 1)]


@pytest.mark.stays("w4a16", "kinds of layers")
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_near_the_dense_ones(checkpoint: Path, dense: LLM, name: str, tmp_path: Path) -> None:
    quant = SCHEMES[name]
    engine = build(checkpoint, tmp_path / "engine", quant=quant, device="cpu", dtype="fp32")
    assert verify(engine, "cpu", note=False).verdict == "proven"
    llm, loaded = LLM(engine, "cpu", max_batch_size=4), LLM(checkpoint, "cpu", quant=quant)
    for prompt in PROMPTS:
        found, exact = llm.logits(prompt), dense.logits(prompt)
        most = 0.5 if "w4" in quant.label else 0.1
        assert 1e-4 < float((found - exact).norm() / exact.norm()) < most
        assert torch.equal(loaded.logits(prompt), found)


@pytest.mark.parametrize("name", ["w8a16", "w4a16", "w4a16 symmetric", "encoder alone"])
def test_they_compute_with_what_their_numbers_mean(checkpoint: Path, name: str) -> None:
    """In both halves: a dense model of the dequantized weights gives the same."""
    llm = LLM(checkpoint, "cpu", quant=SCHEMES[name])
    reference = dense_reference(checkpoint, llm)
    for prompt in PROMPTS:
        torch.testing.assert_close(llm.logits(prompt), reference.logits(prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.stays("w4a16", "w4a8")
@pytest.mark.parametrize("name", ["w8a16", "w4a16", "w8a8", "w4a8", "apart"])
def test_fused_steps_give_the_same(checkpoint: Path, name: str) -> None:
    """Norms with biases, sums and rounding in one kernel, by the kernels' twins, in both halves."""
    llm = LLM(checkpoint, "cpu", quant=SCHEMES[name], max_batch_size=4)
    forward = llm.executor.runner.forward
    found = []
    for forward.fused in (False, True):
        llm.executor.scheduler.encoders.clear()
        found.append(llm.generate(PROMPTS, GREEDY))
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3 if "a8" in name else 1e-4)


@pytest.mark.parametrize("name", HALVES)
def test_each_layer_has_the_scheme_that_was_asked_for(checkpoint: Path, name: str) -> None:
    quant = SCHEMES[name]
    own = linears(LLM(checkpoint, "cpu", quant=quant).engine.model)
    halves = {half: {n for n in own if n.startswith("encoder.") == half} for half in (True, False)}
    assert halves[True]
    wide = {n for n, linear in own.items() if linear.scheme.dense} - {"lm_head"}
    if name == "encoder alone":
        assert wide == halves[False] - {"lm_head"}
    elif name == "decoder alone":
        assert wide == halves[True]
    elif name == "kinds of layers":
        assert wide == {n for n in own if ".encoder_attn." in n}
    else:
        assert not wide


@pytest.mark.stays("w8a16-fp16", "w4a16 symmetric-fp32", "w4a8-fp32", "kinds of layers-fp16")
def _spare(module: torch.nn.Module) -> int:
    """Bytes of scales per row that a CPU's form could have had: the larger form counts."""
    groups = [one for one in linears(module).values() if getattr(one.scheme, "split", "") == "groups"]
    return sum(4 * one.out_features for one in groups)


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(SCHEMES, itertools.cycle(("fp16", "bf16", "fp32")), strict=False))
)
def test_sizes_are_reported_to_the_byte(checkpoint: Path, dtype: str, name: str, tmp_path: Path) -> None:
    """Of the loaded weights, of each stored tensor, of the folder; what is not linear keeps the dtype."""
    quant = SCHEMES[name]
    folder = build(checkpoint, tmp_path / "engine", quant=quant, device="cpu", dtype=dtype, proof=False)
    llm = LLM(folder, "cpu", compute_dtype=dtype, max_batch_size=2)
    engine = llm.engine
    bill = ledger(setting_of(engine.manifest, engine.dtype, engine.device)).items
    assert engine.model.encoder is not None
    encoder = held_bytes(engine.model.encoder)
    weights = [item for item in bill if item.kind == "weights"]
    assert {item.name: item.bytes for item in weights}["encoder"] == encoder + _spare(engine.model.encoder)
    assert sum(item.bytes for item in weights) == held_bytes(engine.model) + _spare(engine.model)
    reported = describe(folder)
    assert reported.bytes_on_disk == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert reported.num_parameters == describe(checkpoint).num_parameters
    plain = {entry.dtype for n, entry in reported.manifest.tensors.items() if "conv" in n or "norm" in n}
    assert plain == {{"fp16": "F16", "bf16": "BF16", "fp32": "F32"}[dtype]}
    assert bool(torch.isfinite(llm.logits(PROMPTS[0])).all())


def test_inspect_shows_the_halves(checkpoint: Path, tmp_path: Path) -> None:
    engine, options = tmp_path / "engine", ("--no-proof", "--device", "cpu", "--dtype", "fp16")
    made = ingot("build", checkpoint, "-o", engine, "--quant", "encoder=w8a16,decoder=w4a16", *options)
    assert made.exit_code == 0, made.output
    manifest = Manifest.read(engine)
    assert manifest.quant == QuantConfig("w4a16", layers={"encoder.*": "w8a16"})
    assert "w4a16+w8a16" in ingot("inspect", engine).output


def test_lengths_of_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    """As many tokens as the decoder has positions, or fewer."""
    whole = build(checkpoint, tmp_path / "whole", device="cpu", proof=False)
    assert Manifest.read(whole).build.max_seq_len == POSITIONS
    short = build(checkpoint, tmp_path / "short", max_seq_len=40, max_batch_size=2, device="cpu", proof=False)
    assert LLM(short, "cpu").executor.admission.max_batch_size == 2
    with pytest.raises(ConfigError, match=rf"exceeds the model's context.*seen: 97.*<= {POSITIONS}"):
        build(checkpoint, tmp_path / "long", max_seq_len=POSITIONS + 1, device="cpu")
    with pytest.raises(ConfigError, match="max_batch_size"):
        build(checkpoint, tmp_path / "none", max_batch_size=0, device="cpu")
    with pytest.raises(ConfigError, match=r"max_seq_len.*40"):
        LLM(short, "cpu", max_seq_len=41)


@pytest.mark.parametrize(
    "named",
    [
        "encoder=w3,decoder=w8a16",
        "encoder=",
        "encoder=w8a16,encoder=w4a16",
        "vision=w8a16",
        "=w8a16",
        "a=b=c",
    ],
)
def test_halves_that_are_not_named_well(named: str) -> None:
    with pytest.raises(ConfigError, match=r"parts of a model.*PART=SCHEME"):
        read_quant(named)


def test_halves_are_patterns_of_layers() -> None:
    assert read_quant("decoder=w4a16, encoder=w8a16") == QuantConfig("w4a16", layers={"encoder.*": "w8a16"})
    assert read_quant("encoder=w8a16") == QuantConfig("none", layers={"encoder.*": "w8a16"})
    assert read_quant("decoder=w8a8").at("encoder.layers.0.mlp.up_proj").scheme == "none"


@pytest.mark.stays("w8a8-int8")
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU's interpreter")
@pytest.mark.parametrize(("name", "kv_dtype"), [("w8a8", "int8"), ("w4a16", "int8"), ("w8a16", "auto")])
def test_interpreted_kernels(checkpoint: Path, name: str, kv_dtype: str) -> None:
    """Each kernel of steps with cross-attention is its twin on the step's operands, caches in 8 bits too."""
    runtime = RuntimeConfig(kv_dtype=kv_dtype, cuda_graphs=False)  # type: ignore[arg-type]
    given: dict[str, Any] = {"quant": SCHEMES[name], "max_batch_size": 4, "runtime": runtime}
    llm = LLM(checkpoint, "cpu", compute_dtype="fp16", **given)
    llm.executor.runner.forward.fused = True
    watched = (forms, norm, products, attention, cross_attention, int8_products)
    brief = SamplingParams(max_new_tokens=2, ignore_eos=True)
    with Witness(torch.float16, *watched) as witness, interpreted(lambda: not witness.by_reference):
        llm.generate([spoken(1, 3, 18), spoken(3, 1, 10)], brief)
    assert witness.faults() == []
    assert witness.calls["paged_attention"] > witness.calls["prefill_attention"] > 0
    ends = {
        "w8a8": {"int8_linear", "int8_linear_parts", "sum_norm", "quantized"},
        "w8a16": {"small_qkv", "sum_norm"},
    }
    assert ends.get(name, {"sum_norm"}) <= set(witness.calls)
