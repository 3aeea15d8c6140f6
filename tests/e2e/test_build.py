"""Builds are reproducible and contain the requested layers and dtypes."""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import BuildError, CheckpointError, ConfigError, RequestError
from tests.e2e.folders import contents, run_python
from tests.tiny_models import edit_config, random_ids, save_model, tiny_config

IDS = random_ids(20, seed=3)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


class TestBytes:
    BUILD = """
import sys
from ingot import build
for dtype in ("auto", "bf16"):
    build(sys.argv[1], f"{sys.argv[2]}/{dtype}", device="cpu", dtype=dtype)
"""

    @pytest.mark.slow
    @pytest.mark.usefixtures("whole_proofs")
    def test_another_process_writes_the_same(self, checkpoint: Path, tmp_path: Path) -> None:
        """In another order of hashes: this process draws its own."""
        (tmp_path / "theirs").mkdir()
        done = run_python(self.BUILD, checkpoint, tmp_path / "theirs", PYTHONHASHSEED="1")
        assert done.returncode == 0, done.stderr
        for dtype in ("auto", "bf16"):
            own = contents(build(checkpoint, tmp_path / "own" / dtype, device="cpu", dtype=dtype))
            assert {"manifest.json", "weights.safetensors", "plan.json", "proof.json"} <= set(own)
            assert own == contents(tmp_path / "theirs" / dtype)
        assert len(list((tmp_path / "theirs").iterdir())) == 2

    def test_with_a_tokenizer_too(self, golden: Path, tmp_path: Path) -> None:
        folder = golden / "llama_aidreams260K" / "hf"
        engines = [build(folder, tmp_path / name, device="cpu") for name in ("a", "b")]
        first, second = map(contents, engines)
        assert any(name.startswith("tokenizer/") for name in first)
        assert first == second

    def test_two_builds_differ_in_verify_json_alone(
        self, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Byte for byte, at other times, of another speed and with calibration."""
        folder, calib = golden / "llama_aidreams260K" / "hf", tmp_path / "calib.txt"
        calib.write_text("One day a dog ran. " * 40)
        chosen = QuantConfig(scheme="w8a8", activations="static")
        clock = iter((datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 2, 2, tzinfo=UTC)))
        monkeypatch.setattr("ingot.engine.proof_file.datetime", SimpleNamespace(now=lambda zone: next(clock)))
        found = []
        for name in ("a", "b"):
            engine = build(folder, tmp_path / name, device="cpu", quant=chosen, calib=calib)
            found.append({p.relative_to(engine): p.read_bytes() for p in engine.rglob("*") if p.is_file()})
        notes = [json.loads(files.pop(Path("verify.json"))) for files in found]
        assert found[0] == found[1]
        assert [note["made"]["time"][:4] for note in notes] == ["2026", "2027"]

    def test_the_manifest_has_the_hash_of_every_tensor(self, engine: Path) -> None:
        manifest = json.loads((engine / "manifest.json").read_text())
        data = (engine / "weights.safetensors").read_bytes()
        assert int.from_bytes(data[:8], "little") % 8 == 0, "tensors start aligned"
        tensors = load_file(engine / "weights.safetensors")
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert list(header) == list(manifest["tensors"])
        for name, tensor in tensors.items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            assert manifest["tensors"][name]["sha256"] == digest


class TestWhatIsBuilt:
    def test_engine_is_the_checkpoint_in_memory(self, checkpoint: Path, engine: Path) -> None:
        built, memory = LLM(engine, "cpu"), LLM(checkpoint, "cpu", max_batch_size=4)
        assert torch.equal(built.logits(IDS), memory.logits(IDS))
        assert built.generate(IDS, PARAMS) == memory.generate(IDS, PARAMS)

    def test_layers_are_the_full_models_own(self, checkpoint: Path, tmp_path: Path) -> None:
        full = LLM(checkpoint, "cpu")
        first = LLM(build(checkpoint, tmp_path / "first", layers="0:1", device="cpu"), "cpu")
        second = LLM(build(checkpoint, tmp_path / "second", layers=(1, 2), device="cpu"), "cpu")
        assert first.engine.manifest.model.num_layers == second.engine.manifest.model.num_layers == 1
        with full.tap("layers.0") as whole:
            full.logits(IDS)
        with first.tap("layers.*") as part:
            first.logits(IDS)
        assert list(part) == ["layers.0"]
        assert torch.equal(part["layers.0"], whole["layers.0"])
        ours, theirs = second.engine.model.layers[0], full.engine.model.layers[1]
        for name, weight in ours.named_parameters():
            assert torch.equal(weight, theirs.get_parameter(name))

    @pytest.mark.parametrize("layers", ["0:3", "2:3", (0, 9)])
    def test_layers_that_are_not_there(self, checkpoint: Path, tmp_path: Path, layers: Any) -> None:
        with pytest.raises(ConfigError, match=r"0:2.*layers"):
            build(checkpoint, tmp_path / "engine", layers=layers, device="cpu")

    @pytest.mark.parametrize("layers", ["1:1", "x", "1", (1, 0), (0,)])
    def test_invalid_layer_ranges(self, checkpoint: Path, tmp_path: Path, layers: Any) -> None:
        with pytest.raises(ConfigError, match="START:END"):
            build(checkpoint, tmp_path / "engine", layers=layers, device="cpu")

    def test_limits(self, checkpoint: Path, tmp_path: Path) -> None:
        llm = LLM(build(checkpoint, tmp_path / "e", max_seq_len=24, max_batch_size=2, device="cpu"), "cpu")
        output = llm.generate(IDS, PARAMS)[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
        with pytest.raises(RequestError, match=r"24 tokens.*<= 23.*max_seq_len"):
            llm.generate(random_ids(24), PARAMS)
        assert llm.logits(random_ids(24)).shape[0] == 24
        prompts = [random_ids(n) for n in (3, 4, 5)]
        assert len(llm.generate(prompts, PARAMS)) == 3
        assert llm.executor.max_batch_size == 2

    @pytest.mark.parametrize("values", [{"max_seq_len": 0}, {"max_batch_size": 0}, {"dtype": "int3"}])
    def test_values_out_of_range(self, checkpoint: Path, tmp_path: Path, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"to fix: {next(iter(values))}$"):
            build(checkpoint, tmp_path / "engine", device="cpu", **values)
        assert list(tmp_path.iterdir()) == []

    def test_learned_positions_bound_the_length(self, tmp_path: Path) -> None:
        save_model(tiny_config("gpt2"), tmp_path / "gpt2")
        with pytest.raises(ConfigError, match=r"129.*128"):
            build(tmp_path / "gpt2", tmp_path / "engine", max_seq_len=129, device="cpu")

    @pytest.mark.parametrize(
        ("dtype", "stored", "tolerance"), [("fp16", "F16", 0.02), ("bf16", "BF16", 0.15)]
    )
    def test_dtypes(
        self, checkpoint: Path, tmp_path: Path, dtype: str, stored: str, tolerance: float
    ) -> None:
        full = LLM(checkpoint, "cpu").logits(IDS)
        folder = build(checkpoint, tmp_path / "engine", dtype=dtype, device="cpu")
        with safe_open(folder / "weights.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
        error = float((LLM(folder, "cpu").logits(IDS) - full).abs().max() / full.abs().max())
        assert 0 < error < tolerance

    @pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
    def test_weights_that_do_not_fit_fp16(
        self, checkpoint: Path, tmp_path: Path, source: torch.dtype
    ) -> None:
        folder = tmp_path / "checkpoint"
        model = save_model(tiny_config("llama"), folder, seed=1)
        state = {name: tensor.to(source) for name, tensor in model.state_dict().items()}
        state["model.layers.1.mlp.down_proj.weight"][3, 4] = 1e5
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BuildError, match=r"layers\.1\.mlp\.down_proj\.weight: largest .*dtype=bf16"):
            build(folder, tmp_path / "engine", dtype="fp16", device="cpu")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
        build(folder, tmp_path / "engine", dtype="bf16", device="cpu")

    @pytest.mark.parametrize("few", ["lm_head", "norm"])
    def test_auto_is_the_dtype_of_most_weights(self, few: str, tmp_path: Path) -> None:
        """Not of the tensor that comes first, and not of most tensors."""
        folder = tmp_path / "checkpoint"
        state = save_model(tiny_config("llama"), folder).state_dict()
        mixed = {name: t if few in name else t.to(torch.bfloat16) for name, t in state.items()}
        save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
        llm = LLM(build(folder, tmp_path / "engine", device="cpu"), "cpu")
        assert (llm.engine.manifest.build.dtype, llm.engine.manifest.source_dtype) == ("bf16", "bf16+fp32")

    def test_without_a_tokenizer(self, engine: Path) -> None:
        llm = LLM(engine, "cpu")
        output = llm.generate(IDS, PARAMS)[0]
        assert (output.text, len(output.token_ids)) == (None, 12)
        for call in (llm.generate, llm.logits, llm.stream):
            with pytest.raises(RequestError, match=r"no tokenizer.*token ids; to fix: `ids="):
                call("Hello")
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "Hello"}])
        with pytest.raises(RequestError, match=r"tokenizer.*stop"):
            llm.generate(IDS, PARAMS.replace(stop=("end",)))


def test_a_config_that_does_not_fit_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    edit_config(folder, intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"mis-shaped.*gate"):
        build(folder, tmp_path / "engine", device="cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
