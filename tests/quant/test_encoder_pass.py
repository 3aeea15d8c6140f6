"""An encoder by kernels that do more than a module: what it computes, what it tells, and its proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.layers.encoder_blocks.encoder import BidirectionalAttention
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.products import layer_products as products
from ingot.layers.products.row_forms import Int8Form
from ingot.layers.step_record import Recorded
from ingot.proof.step_check import check_steps
from ingot.proof.verify_engine import verify
from tests.encoders.speech import FRAMES, LAYERS, MELS, SIZE, write_speech
from tests.quant.test_encoder_decoder import SCHEMES
from tests.unit.tracking import AllocationTracker

pytestmark = pytest.mark.usefixtures("weights_as_stored")

POSITIONS = FRAMES // 2
RUNTIME = RuntimeConfig(cache_tokens=512, encoder_positions=128)
Patched = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder, encoder_layers=3)
    return folder


def features(seed: int, windows: int = 1) -> torch.Tensor:
    return torch.randn(windows, MELS, FRAMES, generator=torch.Generator().manual_seed(seed))


_PROMPTS = [([5, 7], features(5)[0]), ([9], features(5)[0])]


@pytest.mark.stays("w4a16", "w8a8", "w4a8", "kinds of layers")
@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_it_computes_what_its_modules_do(checkpoint: Path, name: str) -> None:
    """One window, and several together. A number of 8 bits may go to its neighbour."""
    model = LLM(checkpoint, "cpu", quant=SCHEMES[name]).engine.model
    for given in (features(1), features(2, windows=3)):
        by_module, fused = model.encode(given), model.encode(given, EncoderPass(fused=True))
        assert fused.shape == by_module.shape
        off = (fused - by_module).norm(dim=-1) / by_module.norm(dim=-1)
        assert float(off.median()) < 1e-5
        assert float(off.max()) < 1e-2


@torch.inference_mode()
def test_it_holds_what_the_ledger_counts(tmp_path: Path) -> None:
    """Queries, keys and values end with attention, not with the layer."""
    write_speech(tmp_path, encoder_ffn_dim=4 * SIZE)
    model = LLM(tmp_path, "cpu").engine.model
    counted = model.config.encoder
    assert counted is not None
    given = features(1, windows=8)
    for forward_pass in (EncoderPass(), EncoderPass(fused=True)):
        with AllocationTracker() as tracker:
            model.encode(given, forward_pass)
        counts = tracker.peak / given.element_size() / (8 * POSITIONS * counted.activation_values)
        assert 0.9 < counts < 1.01


@torch.inference_mode()
def test_its_values_are_reported_in_the_order_of_a_record(checkpoint: Path) -> None:
    """What products take is told as they take it: in 8 bits where they are of 8 bits."""
    reported: list[tuple[str, Recorded]] = []
    model = LLM(checkpoint, "cpu", quant="encoder=w8a8").engine.model
    model.encode(features(3), EncoderPass(fused=True, observer=lambda *one: reported.append(one)))
    layer = ["attn_in", "query", "keys", "values", "attended", "stream", "mlp_in", "inner", "stream"]
    assert [name for name, _ in reported] == ["stream", *layer * 3]
    taken = [value for name, value in reported if name in ("attn_in", "attended", "mlp_in", "inner")]
    assert all(isinstance(value, Int8Rows) for value in taken)
    by_heads = [value.group for name, value in reported if name == "attended" and isinstance(value, Int8Rows)]
    assert by_heads == [8] * 3


def test_a_tap_finds_modules_that_kernels_pass_over(checkpoint: Path) -> None:
    """While it is open; behind it the same as before."""
    llm = LLM(checkpoint, "cpu", quant="w8a8")
    llm.executor.runner.forward.fused = True
    prompt = Prompt([Input(features(4)[0]), [1]])
    names = ["encoder.layers.0.self_attn", "encoder.layers.0.mlp", "encoder.layers.1.input_layernorm"]
    with llm.tap(*names) as seen:
        llm.generate(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert {name: len(seen[name]) for name in names} == dict.fromkeys(names, POSITIONS)


def _bent(change: Callable[[Any], Any], width: int | None = None) -> Patched:
    """Changes what a function gives for as many rows as the encoder has, ``width`` wide."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            rows = found[0] if isinstance(found, tuple) and not isinstance(found, Int8Rows) else found
            values = rows.values if isinstance(rows, Int8Rows) else rows
            own = len(values) == POSITIONS and width in (None, values.shape[1])
            return change(found) if own else found

        return call

    return patched


def _by_one(rows: Int8Rows) -> Int8Rows:
    return Int8Rows((rows.values + (rows.values < 127)).to(torch.int8), rows.scales, rows.group)


FAULTS: dict[str, tuple[Any, str, Patched, str]] = {
    "activation by one": (Int8Form, "activation", _bent(_by_one), "layers.0.mlp (activation)"),
    "norm by one": (
        Int8Form,
        "norm",
        _bent(lambda found: (_by_one(found[0]), found[1])),
        "layers.0.input_layernorm",
    ),
    "heads by one": (products.Int8Product, "in_form", _bent(_by_one), "layers.0.self_attn (attention)"),
    "product": (products.Int8Product, "added", _bent(lambda y: y * 1.01), "layers.0.self_attn.o_proj"),
    "queries": (
        products.Int8Product,
        "full_output",
        _bent(lambda y: y * 1.01, 96),
        "layers.0.self_attn.qkv_proj (queries)",
    ),
}


@pytest.mark.stays("activation by one", "queries")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_is_of_the_kernels_and_finds_a_fault(
    checkpoint: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint, tmp_path / "engine", device="cpu", quant="w8a8", proof=False)

    def failures() -> list[tuple[str, str]]:
        llm = LLM(engine, "cpu", max_seq_len=32, runtime=RUNTIME)
        llm.executor.runner.forward.fused = True
        return check_steps(llm, engine, _PROMPTS, 2).failures

    assert failures() == []
    owner, name, patched, place = FAULTS[fault]
    monkeypatch.setattr(owner, name, patched(getattr(owner, name)))
    assert failures()[0][0] == f"encoder.{place}"


@pytest.mark.parametrize(("units", "is_far"), [(12, False), (24, True)])
def test_attention_that_ends_in_8_bits_may_be_off_as_far_as_any(
    checkpoint: Path, tmp_path: Path, units: float, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 16 units, as docs/proof.md has it."""
    engine = build(checkpoint, tmp_path / "engine", device="cpu", dtype="bf16", quant="w8a8", proof=False)
    llm = LLM(engine, "cpu", compute_dtype="bf16", max_seq_len=32, runtime=RUNTIME)
    llm.executor.runner.forward.fused = True
    attend, noise = BidirectionalAttention.attend, torch.Generator().manual_seed(0)

    def noisy(self: BidirectionalAttention, joined: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = attend(self, joined, *rest).float()
        sign = torch.randint(0, 2, found.shape, generator=noise) * 2.0 - 1
        size = found.abs() + found.square().mean(dim=1, keepdim=True).sqrt()
        return (found + units * torch.finfo(torch.bfloat16).eps * size * sign).to(joined.dtype)

    monkeypatch.setattr(BidirectionalAttention, "attend", noisy)
    failures = check_steps(llm, engine, _PROMPTS, 2).failures
    assert [place for place, _ in failures] == ["encoder.layers.0.self_attn (attention)"] * is_far


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("none", "fp32"), *((name, "fp16") for name in ("none", "w8a8", "w4a8", "encoder alone"))],
)
def test_engines_are_proven_on_a_gpu(tmp_path: Path, name: str, dtype: str) -> None:
    """Of widths that the kernels' tiles read whole."""
    write_speech(tmp_path / "model", d_model=256, encoder_ffn_dim=1024, decoder_ffn_dim=1024)
    quant = SCHEMES.get(name, QuantConfig())
    engine = build(tmp_path / "model", tmp_path / "engine", device="cuda", dtype=dtype, quant=quant)
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for op in ("in_form", "added"):
            own = getattr(products.Int8Product, op)
            patch.setattr(products.Int8Product, op, lambda *a, own=own, op=op: calls.update([op]) or own(*a))
        found = verify(engine, "cuda", note=False)
    assert found.verdict == "proven", found.failures
    assert [calls[op] >= LAYERS for op in ("in_form", "added")] == ["a8" in name] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["w8a8", "encoder=w8a8"])
def test_kernels_on_a_gpu_encode_as_modules_do(tmp_path: Path, quant: str) -> None:
    write_speech(tmp_path / "model", d_model=256, encoder_ffn_dim=1024, decoder_ffn_dim=1024)
    llm = LLM(tmp_path / "model", "cuda", compute_dtype="fp16", quant=quant)
    model = llm.engine.model
    with torch.inference_mode():
        for windows in (1, 4):
            given = features(windows, windows).cuda().half()
            by_module, fused = model.encode(given), model.encode(given, EncoderPass(fused=True))
            off = float((fused - by_module).float().norm() / by_module.float().norm())
            assert 0 < off < 2e-2
            assert bool(torch.isfinite(fused).all())
