"""An engine as built verifies, and changes are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.building.golden import golden_cases as golden
from ingot.config.half_dtypes import HalfDtypes
from ingot.engine.engine_loader import Engine
from ingot.engine.manifest import Manifest
from ingot.engine.proof_file import Proof, ProofOrigin, digest, read_proof
from ingot.layers import attention, mlp, norm
from ingot.proof.golden_replay import FACTOR
from ingot.proof.verify_engine import Verification, verify
from tests.e2e.folders import ROOT, contents
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import save_model, tiny_config

pytestmark = pytest.mark.usefixtures("long_proofs")
Built = dict[str, Path]
Copy = Callable[[str], Path]
KINDS = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "opt")
ODD: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 11},
    "tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        }
    },
}


@pytest.fixture(scope="module")
def built(long_proofs: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An engine in bf16 of every kind."""
    root = tmp_path_factory.mktemp("engines")
    for kind in KINDS:
        save_model(tiny_config(kind), root / "checkpoints" / kind, seed=1)
        build(root / "checkpoints" / kind, root / kind, dtype="bf16", device="cpu")
    write_tiny(root / "checkpoints" / "qwen")
    build(root / "checkpoints" / "qwen", root / "qwen", dtype="fp16", device="cpu")
    return {kind: root / kind for kind in (*KINDS, "qwen")}


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Copy:
    """copy(kind): an engine that a test may change."""
    return lambda kind: Path(shutil.copytree(built[kind], tmp_path / kind))


def kinds_and_names(found: Verification) -> list[tuple[str, str]]:
    return [(failure.kind, failure.name) for failure in found.failures]


class TestProven:
    @pytest.mark.parametrize("kind", [*KINDS, "qwen"])
    def test_an_engine_as_built(self, built: Built, kind: str) -> None:
        found = verify(built[kind], "cpu", note=False)
        assert found.verdict == "proven", found.failures
        assert (found.device is not None, found.dtype, found.num_cases) == (True, "fp32", 5)
        assert set(found.worst) == {"logprobs", "logits", "modules"}
        assert 0 < max(found.worst.values()) < FACTOR
        assert 0 < found.limits["logits"] < 1e-3
        assert (found.equal_rows, found.num_rows, found.notes) == (12, 12, ())

    @pytest.mark.stays("llama", "gpt2")
    @pytest.mark.parametrize("kind", KINDS)
    def test_its_own_dtype_has_its_own_floor(
        self, built: Built, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In bf16 the engine is far from the fp32 proof, and within bf16's own noise."""
        own = HalfDtypes.of("bf16")
        monkeypatch.setattr("ingot.engine.engine_loader.compute_dtypes", lambda *_: own)
        found = verify(built[kind], "cpu", note=False)
        assert (found.verdict, found.dtype) == ("proven", "bf16"), found.failures
        monkeypatch.setattr(Engine, "dtypes", HalfDtypes.of("fp32"))
        failed = verify(built[kind], "cpu", note=False)
        assert failed.verdict == "failed"
        assert failed.first_bad_module == "layers.0.self_attn"

    def test_the_cases(self, built: Built) -> None:
        proof = read_proof(built["qwen"])
        assert proof is not None
        lengths = {case.name: len(case.prompt_ids) for case in proof.claims.cases}
        assert lengths == {"short": 8, "long": 200, "script": 40, "one block": 64, "over one block": 65}
        assert all(case.text and len(case.new_ids) == golden.NEW_TOKENS for case in proof.claims.cases)
        assert set(proof.claims.floors) == {"fp32", "fp16"}

    def test_a_short_engine_has_shorter_cases(self, built: Built, tmp_path: Path) -> None:
        checkpoint = built["llama"].parent / "checkpoints" / "llama"
        for length, cases in ((1, 0), (2, 5), (9, 5)):
            engine = build(checkpoint, tmp_path / str(length), max_seq_len=length, device="cpu")
            found = verify(engine, "cpu")
            verdict = "proven" if cases else "unproven"
            assert (found.verdict, found.num_cases) == (verdict, cases), found.failures

    @pytest.mark.stays("window", "yarn", "ntk")
    @pytest.mark.parametrize("kind", ["window", "llama3", "yarn", "linear", "tied", "ntk"])
    def test_other_mathematics(self, tmp_path: Path, kind: str) -> None:
        """The reference and the runtime are two implementations; each must know what a config can ask for."""
        if kind == "ntk":
            write_tiny(tmp_path / "checkpoint", seq_length=32, max_position_embeddings=256)
        else:
            architecture = "mistral" if kind == "window" else "llama"
            save_model(tiny_config(architecture, **ODD[kind]), tmp_path / "checkpoint", seed=3)
        found = verify(build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu"), "cpu")
        assert found.verdict == "proven", found.failures
        assert found.num_cases == 5

    @pytest.mark.slow
    @pytest.mark.usefixtures("whole_proofs")
    def test_the_pocket_model(self, tmp_path: Path) -> None:
        found = verify(build(ROOT / "models" / "pocket-chat", tmp_path / "pocket", device="cpu"), "cpu")
        assert found.verdict == "proven", found.failures

    def test_builds_agree(self, built: Built, tmp_path: Path) -> None:
        checkpoint = built["qwen3"].parent / "checkpoints" / "qwen3"
        again = build(checkpoint, tmp_path / "again", dtype="bf16", device="cpu")
        assert contents(again) == contents(built["qwen3"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_proven_on_a_gpu_and_on_a_cpu(built: Built, tmp_path: Path, kind: str, dtype: str) -> None:
    """Graphs and fused kernels are within the floor that plain PyTorch measured, wherever it did."""
    checkpoint = built[kind].parent / "checkpoints" / kind
    for place in ("cuda", "cpu"):
        engine = build(checkpoint, tmp_path / place, dtype=dtype, device=place, tune=False)
        for device in ("cuda", "cpu"):
            found = verify(engine, device)
            assert found.verdict == "proven", (place, device, found.failures)


class TestBytes:
    @pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "norm.weight"])
    def test_one_flipped_mantissa_bit_is_named(self, copy: Copy, name: str) -> None:
        engine = copy("llama")
        path = engine / "weights.safetensors"
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        begin, _ = json.loads(data[8 : 8 + size])[name]["data_offsets"]
        data[8 + size + begin] ^= 1
        path.write_bytes(bytes(data))
        found = verify(engine, "cpu")
        assert kinds_and_names(found) == [("tensor", name)]
        assert f"weights.safetensors: tensor {name}" in found.failures[0].message
        assert found.dtype is None, "nothing ran"

    def test_every_damage_is_named(self, copy: Copy) -> None:
        engine = copy("qwen")
        (engine / "tokenizer" / "qwen.tiktoken").write_text("")
        cut = engine / "weights.safetensors"
        cut.write_bytes(cut.read_bytes()[:-1])
        found = verify(engine, "cpu")
        assert kinds_and_names(found) == [
            ("file", "tokenizer/qwen.tiktoken"),
            ("file", "weights.safetensors"),
        ]

    @pytest.mark.parametrize(
        ("change", "reported"),
        [
            (lambda text: text[:-20], "damaged"),
            (lambda text: text.replace('"threads": ', '"threads": 1'), "hash mismatch"),
            (lambda text: text.replace("\n}\n", ',\n  "more": 0\n}\n'), "hash mismatch"),
            (lambda text: text + " ", "hash mismatch"),
            (lambda text: text.replace('"log_sum":', '"log_sum":1'), "hash mismatch"),
            (lambda text: text.replace('"version": 2', '"version": 9'), "version 9"),
            (lambda text: "[]", "damaged"),
        ],
    )
    def test_a_damaged_proof(self, copy: Copy, change: Any, reported: str) -> None:
        engine = copy("llama")
        path = engine / "proof.json"
        path.write_text(change(path.read_text()))
        found = verify(engine, "cpu")
        assert (found.verdict, kinds_and_names(found)) == ("failed", [("file", "proof.json")])
        assert reported in found.failures[0].message

    def test_the_proof_of_another_engine(self, copy: Copy, built: Built) -> None:
        engine = copy("llama")
        shutil.copyfile(built["qwen2"] / "proof.json", engine / "proof.json")
        assert "belongs to a different manifest.json" in verify(engine, "cpu").failures[0].message


def off(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    """The same kernel with what it returns scaled."""

    def wrong(*values: Any, **names: Any) -> Any:
        result = function(*values, **names)
        return tuple(r * (1 + by) for r in result) if isinstance(result, tuple) else result * (1 + by)

    return wrong


class TestNumbers:
    @pytest.mark.parametrize(
        ("place", "name", "first", "step"),
        [
            (mlp, "silu_mul", "layers.0.mlp", "layers.0.mlp (activation)"),
            (attention, "rope_kv_write", "layers.0.self_attn", "layers.0.self_attn.qkv_proj (queries)"),
            (attention, "prefill_attention", "layers.0.self_attn", "layers.0.self_attn (attention)"),
            (norm, "rms_norm", "layers.0.self_attn", "layers.0.input_layernorm"),
        ],
    )
    def test_a_wrong_kernel(
        self,
        built: Built,
        monkeypatch: pytest.MonkeyPatch,
        place: Any,
        name: str,
        first: str,
        step: str,
    ) -> None:
        """1e-3 is much less than bf16 rounds by, and found where the arithmetic is fp32."""
        right = getattr(place, name)
        wrong = off(right, 1e-3)
        if name == "prefill_attention":  # writes into what it is given
            wrong = lambda *a, **k: right(*a, **k).mul_(1.001)  # noqa: E731
        monkeypatch.setattr(place, name, wrong)
        found = verify(built["llama"], "cpu", note=False)
        assert (found.verdict, found.first_bad_module) == ("failed", first)
        assert (found.failures[0].kind, found.failures[0].name) == ("step", step)
        (module,) = [failure for failure in found.failures if failure.kind == "module"]
        assert first in module.message

    def test_a_kernel_that_is_wrong_in_decodes_only(
        self, built: Built, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = attention.paged_attention
        monkeypatch.setattr(attention, "paged_attention", lambda *a, **k: right(*a, **k).mul_(1.01))
        found = verify(built["llama"], "cpu", note=False)
        assert found.first_bad_module == "layers.0.self_attn"
        reported = [failure.message for failure in found.failures if failure.kind in ("step", "module")]
        assert len(reported) == 2
        assert all("decoded tokens" in message for message in reported)

    def test_one_layer_that_is_off_is_the_one_named(
        self, built: Built, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm_of = LLM.of_engine

        def bent(engine: Any, runtime: Any) -> LLM:
            engine.model.layers[1].mlp.down_proj.weight.data[3, 5] += 0.05
            return llm_of(engine, runtime)

        monkeypatch.setattr(LLM, "of_engine", bent)
        assert verify(built["qwen3"], "cpu", note=False).first_bad_module == "layers.1.mlp"

    def test_a_kernel_that_gives_no_numbers(self, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mlp, "silu_mul", off(mlp.silu_mul, float("nan")))
        found = verify(built["llama"], "cpu", note=False)
        assert found.first_bad_module == "layers.0.mlp"
        kinds = [kind for kind, _ in kinds_and_names(found)]
        assert kinds[0] == "step"
        assert kinds[kinds.index("module") :][:2] == ["module", "engine"]

    def test_another_tokenizer_fails(self, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        from ingot.text.tokenizer.tokenizer_tiktoken import TiktokenTokenizer

        plain = TiktokenTokenizer.encode
        monkeypatch.setattr(TiktokenTokenizer, "encode", lambda self, text: [1, *plain(self, text)])
        found = verify(built["qwen"], "cpu", note=False)
        assert {kind for kind, _ in kinds_and_names(found)} == {"tokenizer"}

    def test_a_tie_within_the_noise_is_not_a_failure(self, built: Built, copy: Copy) -> None:
        """A proof whose second token is as likely as its first, and that chose the other."""
        engine = copy("gpt2")
        proof = read_proof(engine)
        assert proof is not None
        case = proof.claims.cases[0]
        step = case.steps[2]
        tied = step.replace(
            top_ids=(step.top_ids[1], step.top_ids[0], *step.top_ids[2:]),
            top_logits=(step.top_logits[0], *step.top_logits[:1], *step.top_logits[2:]),
        )
        ids = (*case.new_ids[:2], tied.top_ids[0], *case.new_ids[3:])
        floors = {"fp32": proof.claims.floors["fp32"].replace(logprobs=9.0)}
        changed = case.replace(new_ids=ids, steps=(*case.steps[:2], tied, *case.steps[3:]))
        rewrite(engine, proof, cases=(changed, *proof.claims.cases[1:]), floors=floors)
        found = verify(engine, "cpu")
        assert found.verdict == "proven", found.failures
        assert "new token 3" in found.notes[0]
        assert "a tie within the noise" in found.notes[0]
        rewrite(engine, proof, cases=(changed, *proof.claims.cases[1:]), floors=proof.claims.floors)
        assert ("logits", "short") in kinds_and_names(verify(engine, "cpu"))


def rewrite(engine: Path, proof: Proof, **claims: Any) -> Proof:
    changed = Proof.of(proof.claims.replace(**claims), proof.made)
    (engine / "proof.json").write_text(changed.dump())
    return changed


def test_text_and_json(copy: Copy) -> None:
    engine = copy("qwen")
    shown = ingot("verify", engine, "--device", "cpu")
    assert (shown.exit_code, shown.stdout.splitlines()[0].startswith("proven ")) == (0, True)
    assert "% of a row of logits" in shown.stdout
    reported = json.loads(ingot("verify", engine, "--device", "cpu", "--json").stdout)
    assert (reported["verdict"], reported["failures"], reported["dtype"]) == ("proven", [], "fp32")
    assert reported["proven_by"]["dtype"] == "fp16"
    inspected = json.loads(ingot("inspect", engine, "--json").stdout)
    assert inspected["proof"]["cases"]["long"] == [200, golden.NEW_TOKENS]
    assert inspected["doubt"] is None
    assert "golden cases" in ingot("inspect", engine).stdout
    assert ingot("diff", engine, engine).exit_code == 0


def test_a_model_that_gives_no_numbers_is_built_without_a_proof(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tiny_config("llama"), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = 3e38
    save_file(weights, path, metadata={"format": "pt"})
    engine = build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu")
    assert "no proof" in caplog.text
    assert read_proof(engine) is None


def test_a_proof_reads_as_it_was_written(built: Built) -> None:
    text = (built["llama"] / "proof.json").read_text()
    proof = read_proof(built["llama"])
    assert proof is not None
    assert proof.dump() == text
    assert proof.sha256 == digest(proof.to_json())
    assert isinstance(proof.made, ProofOrigin)
    with safe_open(built["llama"] / "weights.safetensors", "pt") as file:
        assert set(file.keys()) == set(Manifest.read(built["llama"]).tensors)
