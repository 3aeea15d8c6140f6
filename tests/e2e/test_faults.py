"""Faults after an engine's hashes were compared fail ``verify`` in every scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot import LLM
from ingot.building.golden import golden_cases as golden
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import load_engine
from ingot.engine.manifest import Manifest
from ingot.kernels.weight import stored_weight
from ingot.proof.step_check import check_steps
from ingot.proof.verify_engine import verify
from ingot.quant.schemes import half_packed, in_panels
from ingot.runtime.sampling import sampler
from tests.e2e.block_faults import block_fault
from tests.e2e.faults import FAULTS, SCHEMES, build_scheme, faulty

PLACES = {
    "SiLU x 1.01": "layers.0.mlp (activation)",
    "decode query x 1.1": "layers.0.self_attn (attention)",
    "down scales x 1.05": "layers.0.mlp.down_proj",
    "head rolled by a row": "lm_head",
    "head zeroed": "lm_head",
    "head negated": "lm_head",
    "output product zeroed": "layers.0.self_attn.o_proj",
    "rotary off by one": "layers.0.self_attn.qkv_proj (queries)",
}
ROUNDED = [name for name in SCHEMES if name not in ("dense", "w8a16", "w4a16")]
PROMPTS = [([5, 300, 41], None), ([7, 8, 9, 10, 11, 12, 13], None)]
BLOCKS = [
    ("a zero off by one", "self_attn.qkv_proj", "self_attn.qkv_proj (queries)"),
    ("a zero off by one", "mlp.down_proj", "mlp.down_proj"),
    ("a scale x 1.01", "self_attn.o_proj", "self_attn (attention)"),
    ("a scale x 1.01", "mlp.gate_up_proj", "post_attention_layernorm"),
    ("zeros of a block are not taken away", "self_attn.qkv_proj", "self_attn.qkv_proj (queries)"),
    ("zeros of a block are not taken away", "mlp.down_proj", "mlp.down_proj"),
    ("the shift in fp16", "self_attn.qkv_proj", "self_attn.qkv_proj (queries)"),
    ("the shift in fp16", "mlp.gate_up_proj", "mlp (activation)"),
    ("two channels exchanged", "self_attn.qkv_proj", "input_layernorm"),
    ("a block x 1.001", "self_attn.o_proj", "self_attn.o_proj"),
    ("a block x 1.001", "mlp.down_proj", "mlp.down_proj"),
    ("a boundary off by one", "mlp.gate_up_proj", "mlp (activation)"),
    ("a boundary off by one", "self_attn.o_proj", "self_attn.o_proj"),
]
BRIEF = [  # every fault in an engine of each walk, one in every other
    pytest.param(
        scheme,
        fault,
        marks=() if scheme in ("w8a8", "rptq-w4a4") or fault == "SiLU x 1.01" else pytest.mark.slow,
    )
    for scheme in ROUNDED
    for fault in FAULTS
]


pytestmark = pytest.mark.usefixtures("long_proofs")


@pytest.fixture(scope="module")
def engine(long_proofs: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """engine(scheme): one layer of the pocket model."""
    root, built = tmp_path_factory.mktemp("faults"), {}

    def of(scheme: str) -> Path:
        if scheme not in built:
            built[scheme] = build_scheme(scheme, root / scheme.replace(", ", "-"), "cpu", layers="0:1")
        return built[scheme]

    return of


@pytest.mark.stays("w8a8 static", "w8a8, int8 cache", "rptq-w4a4")
@pytest.mark.parametrize("scheme", ROUNDED)
def test_a_sound_engine_is_proven_far_from_its_limits(engine: Callable[[str], Path], scheme: str) -> None:
    found = verify(engine(scheme), "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert found.num_steps > golden.NEW_TOKENS
    assert set(found.steps) >= {"stream", "attn_in", "query", "keys", "values", "attended", "inner", "logits"}
    assert 0 < max(found.steps.values()) < 0.5


@pytest.mark.slow
def test_all_layers_of_rptq_are_proven(tmp_path: Path) -> None:
    """Its products add what their zeros take away, by the most in the last layers."""
    found = verify(build_scheme("rptq-w4a4", tmp_path / "engine", "cpu"), "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert 0 < max(found.steps.values()) < 0.25


@pytest.mark.stays(
    "w8a8-SiLU x 1.01",
    "w8a8-head zeroed",
    "w8a8-down scales x 1.05",
    "w8a8 static-SiLU x 1.01",
    "rptq-w4a8-SiLU x 1.01",
    "rptq-w4a4-head rolled by a row",
    "rptq-w4a4-rotary off by one",
)
@pytest.mark.parametrize(("scheme", "fault"), BRIEF)
def test_a_fault_is_found_where_it_is(engine: Callable[[str], Path], scheme: str, fault: str) -> None:
    folder = engine(scheme)
    runs = RuntimeConfig(cache_tokens=512).of_engine(Manifest.read(folder).build.kv_dtype)
    with faulty(fault):
        loaded = load_engine(folder, torch.device("cpu"), max_seq_len=512, runtime=runs)
        found = check_steps(LLM.of_engine(loaded, runs), folder, PROMPTS, new_tokens=3)
    assert found.failures[0][0] == PLACES[fault]


@pytest.mark.parametrize(("fault", "layer", "place"), BLOCKS)
def test_a_small_fault_of_one_block(
    engine: Callable[[str], Path], fault: str, layer: str, place: str
) -> None:
    folder, runs = engine("rptq-w4a4"), RuntimeConfig(cache_tokens=512)
    with block_fault(fault, f"layers.0.{layer}", block=0):
        loaded = load_engine(folder, torch.device("cpu"), max_seq_len=512, runtime=runs)
        found = check_steps(LLM.of_engine(loaded, runs), folder, PROMPTS, new_tokens=3)
    assert [name for name, _ in found.failures][:1] == [f"layers.0.{place}"]


def test_scaled_keys_in_an_8_bit_cache(engine: Callable[[str], Path]) -> None:
    folder = engine("w8a8, int8 cache")
    with faulty("keys of a head x 1.05"):
        runs = RuntimeConfig(cache_tokens=512).of_engine("int8")
        loaded = load_engine(folder, torch.device("cpu"), max_seq_len=512, runtime=runs)
        found = check_steps(LLM.of_engine(loaded, runs), folder, PROMPTS, new_tokens=3)
    assert [place for place, _ in found.failures] == ["layers.0.self_attn.qkv_proj (keys)"]


def test_a_token_that_is_not_the_likeliest_is_found(
    engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are right, and the sampler takes another token."""

    def second(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.float().topk(2)
        return ids[:, 1], values[:, 1]

    folder, runs = engine("w8a8"), RuntimeConfig(cache_tokens=512)
    loaded = load_engine(folder, torch.device("cpu"), max_seq_len=512, runtime=runs)
    monkeypatch.setattr(sampler, "greedy_reference", second)
    found = check_steps(LLM.of_engine(loaded, runs), folder, PROMPTS, new_tokens=3)
    assert [place for place, _ in found.failures] == ["sampler"] * 6
    assert "was chosen, but the step's own logits say" in found.failures[0][1]


@pytest.mark.parametrize("scheme", ["w8a8", "rptq-w4a4"])
def test_a_fault_fails_verify(engine: Callable[[str], Path], scheme: str) -> None:
    with faulty("down scales x 1.05"):
        found = verify(engine(scheme), "cpu", note=False)
    assert found.verdict == "failed"
    assert (found.failures[0].kind, found.failures[0].name) == ("step", PLACES["down scales x 1.05"])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu(tmp_path: Path, scheme: str) -> None:
    """Fused kernels and graphs, in the engine's 16 bits."""
    built = build_scheme(scheme, tmp_path / "engine", "cuda")
    sound = verify(built, "cuda", note=False)
    assert sound.verdict == "proven", sound.failures
    for fault in FAULTS:
        with faulty(fault):
            found = verify(built, "cuda", note=False)
        assert found.verdict == "failed", fault
        assert any(failure.kind == "step" for failure in found.failures), (fault, found.failures)


@pytest.mark.stays("w4a16")
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_weights_that_are_unpacked_wrongly(
    engine: Callable[[str], Path], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof unpacks by itself: a mistake of the CPU's twins is not repeated in it."""
    folder = engine(scheme)
    assert verify(folder, "cpu", note=False).verdict == "proven"
    right = stored_weight.unpacked
    for module in (stored_weight, half_packed, in_panels):
        monkeypatch.setattr(module, "unpacked", lambda weight: right(weight).roll(1, 1))
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "failed"
