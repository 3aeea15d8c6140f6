"""A speech engine's proof is of its log-mel, its encoder and its cross-attention; what is wrong is named."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ingot import LLM
from ingot.audio import log_mel as mels
from ingot.audio.log_mel import log_mel
from ingot.building.builder import build
from ingot.building.golden.golden_speech import exact_log_mel, golden_samples
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import load_engine
from ingot.engine.proof_file import read_proof
from ingot.kernels.attention import encoder_attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.forward_batch import LayerCache
from ingot.proof.golden_replay import replay
from ingot.proof.step_check import check_steps
from ingot.proof.verify_engine import verify
from tests.speech.engines import FAULTS, planted


def test_the_proof_is_of_encoder_and_cross_attention(tiny_engine: Path) -> None:
    proof = read_proof(tiny_engine)
    assert proof is not None
    whole, third = proof.claims.inputs
    assert (whole.size, third.size) == ((80 * 160,), (26 * 160,))
    assert {case.input for case in proof.claims.cases} == {0, 1}
    assert [*whole.modules][:4] == [
        "encoder.conv1", "encoder.conv2", "encoder.embed_positions", "encoder.layers.0.self_attn",
    ]  # fmt: skip
    assert whole.modules["encoder.norm"].count == 40
    assert {"layers.0.encoder_attn.kv_proj", "layers.1.encoder_attn.kv_proj"} < set(whole.modules)
    assert "layers.0.encoder_attn" in proof.claims.cases[0].prompt
    assert set(whole.modules) | set(proof.claims.cases[0].prompt) == set(proof.claims.floors["fp32"].modules)


def test_golden_speech_has_the_features_that_an_engine_makes() -> None:
    samples = golden_samples("whole", 30 * 16000)
    assert samples[:4].tolist() == pytest.approx([0.0632925, 0.1704823, 0.2240023, 0.3318512], abs=1e-7)
    assert 0.3 < float(samples.abs().max()) < 1
    for count in (80, 128):
        exact = exact_log_mel(samples, count)
        assert exact.shape == (count, 3000)
        assert float((exact - log_mel(samples, count)).abs().max()) < 2e-5


def test_a_sound_engine_is_proven_far_from_its_limits(tiny_engine: Path) -> None:
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert not found.notes
    assert {"cross_in", "cross_query", "cross_attended"} < set(found.steps)
    assert {"encoder conv1", "encoder kv_proj", "encoder norm"} < set(found.steps)
    assert 0 < max(found.steps.values()) < 0.5
    assert 0 < found.worst["log-mel"] < 3


@pytest.mark.stays("conv1 by 1 %", "keys' sign", "up", "cross values", "decoder's MLP")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(tiny_engine: Path, fault: str) -> None:
    runs = RuntimeConfig(cache_tokens=512, encoder_positions=128)
    loaded = planted(fault, tiny_engine, torch.device("cpu"), max_seq_len=32, runtime=runs)
    features = [exact_log_mel(golden_samples(fault, 160 * frames), 8).float() for frames in (80, 20)]
    llm = LLM.of_engine(loaded, runs)
    prompts = [([5, 7], features[0]), ([9], features[1])]
    found = check_steps(llm, tiny_engine, prompts, new_tokens=2)
    assert found.failures[0][0] == FAULTS[fault][2], found.failures


@pytest.mark.stays("conv1 by 1 %", "cross values")
@pytest.mark.parametrize("fault", ["conv1 by 1 %", "positions by one", "down", "cross values"])
def test_a_fault_fails_verify(tiny_engine: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.proof.verify_engine.load_engine", partial(planted, fault))
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "failed"
    assert found.failures[0].name == FAULTS[fault][2], found.failures
    module = FAULTS[fault][2].removesuffix(".down_proj")
    assert found.first_bad_module == module


def test_wrong_mel_filters_are_found(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mels._constants

    def wrong(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        window, filters = right(count, device)
        return window, filters.roll(1, 1)

    monkeypatch.setattr(mels, "_constants", wrong)
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "failed"
    assert [failure.name for failure in found.failures] == ["log-mel"] * 2


def test_a_mask_in_the_encoder_is_found(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        encoder_attention.F,
        "scaled_dot_product_attention",
        lambda q, k, v, **_: right(q, k, v, is_causal=True),
    )
    found = verify(tiny_engine, "cpu", note=False)
    assert found.failures[0].name == "encoder.layers.0.self_attn (attention)"
    assert found.first_bad_module == "encoder.layers.0.self_attn"


def test_a_cross_cache_that_lacks_a_position_is_found(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CrossAttention.write

    def write(self: CrossAttention, encoded: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        right(self, encoded, cache, slots)
        cache.keys[slots[-1] // cache.block_size, :, slots[-1] % cache.block_size] = 0

    monkeypatch.setattr(CrossAttention, "write", write)
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "failed"
    assert found.first_bad_module == "layers.0.encoder_attn"


@pytest.mark.stays("bf16-w8a8")
@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [("fp16", "none"), ("bf16", "w8a8"), pytest.param("bf16", "w4a16", marks=pytest.mark.slow)],
)
def test_every_dtype_and_scheme_is_proven(
    tiny_checkpoint: Path, tmp_path: Path, dtype: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tiny_checkpoint, tmp_path / "engine", dtype=dtype, device="cpu", quant=scheme)
    found = verify(tmp_path / "engine", "cpu", note=False)
    assert found.verdict == "proven", found.failures
    monkeypatch.setattr("ingot.proof.verify_engine.load_engine", partial(planted, "last norm"))
    found = verify(tmp_path / "engine", "cpu", note=False)
    assert found.failures[0].name == "encoder.norm"


def test_fewer_requests_at_once_than_inputs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build(tiny_checkpoint, tmp_path / "engine", device="cpu", max_batch_size=1)
    runtime = RuntimeConfig(encoder_positions=64)
    assert verify(tmp_path / "engine", "cpu", note=False, runtime=runtime).verdict == "proven"


def test_an_older_proof_says_that_it_knows_no_encoder(tiny_engine: Path) -> None:
    proof = read_proof(tiny_engine)
    assert proof is not None
    case = proof.claims.cases[0]
    own = {name: checksum for name, checksum in case.prompt.items() if "encoder" not in name}
    case = case.replace(input=None, prompt=own)
    runs = RuntimeConfig(cache_tokens=512)
    llm = LLM.of_engine(load_engine(tiny_engine, torch.device("cpu"), runtime=runs), runs)
    played = replay(llm, proof.claims.replace(inputs=(), cases=(case,)), lambda text: None)
    assert any("says nothing of the encoder" in note for note in played.notes)
