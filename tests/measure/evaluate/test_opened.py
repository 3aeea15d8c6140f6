"""What ``bench``, ``eval`` and ``sweep`` say of one model in the same way, since they open it in one way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ingot.cli.measure.sweep_quality import DataQuality
from ingot.errors import CheckpointError, ConfigError, OutOfMemoryError
from ingot.measure.bench.sweep.sweep_session import Sweep
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.loss_limits import limits_for
from ingot.measure.evaluate.planned_metrics import plan_proving
from ingot.measure.evaluate.token_divergence import divergence
from ingot.measure.side.class_side import HuggingFaceSide
from ingot.measure.side.huggingface import load_class
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, against_parts
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

CPU = torch.device("cpu")


def test_the_words_of_against() -> None:
    assert against_parts("hf") == (True, None)
    assert against_parts("hf:org/name") == (True, "org/name")
    assert against_parts("org/hf") == (False, "org/hf")


def test_a_class_without_a_checkpoint_is_refused_everywhere(llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("words")
    said = ["hf: needs a checkpoint", "hf:CHECKPOINT, or hf"]
    for words in (("bench", "latency", llama), ("eval", "perplexity", llama, "--data", data)):
        result = ingot(*words, "--against", "hf:", "--device", "cpu")
        assert result.exit_code == 2
        assert all(part in result.stderr for part in said)
    with pytest.raises(ConfigError, match=said[0]):
        Sweep(SideSpec(path=str(llama), device="cpu"), against="hf:")
    with pytest.raises(ConfigError, match=said[0]):
        plan_proving(data, str(llama), against="hf:")


def test_qwen_v1_is_measured_as_it_is_evaluated(chatter: Path) -> None:
    ids = [3, 4, 5, 6]
    measured = open_side(SideSpec(path=str(chatter), kind="hf", device="cpu"))
    with open_side(SideSpec(str(chatter), kind="hf", device="cpu")) as evaluated:
        facts = (measured.facts(), evaluated.facts())
        assert [one["class"] for one in facts] == ["Qwen2ForCausalLM"] * 2
        assert measured.max_seq_len == evaluated.max_seq_len == 256
        assert isinstance(measured, HuggingFaceSide)
        (answer,) = evaluated.generate([ids], 3, [], [])
        assert measured.complete([ids], 3).tolist() == [answer.token_ids]


def test_random_weights_of_qwen_v1(chatter: Path) -> None:
    spec = SideSpec(random_weights=str(chatter / "config.json"), device="cpu", kind="hf")
    assert open_side(spec).facts()["class"] == "Qwen2ForCausalLM"


def test_weights_of_another_shape_are_reported(llama: Path, other_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    config = (broken / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    (broken / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="Hugging Face's class cannot load this"):
        open_side(SideSpec(str(broken), kind="hf", device="cpu"))


def test_a_class_beyond_the_memory_is_reported(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: RuntimeError) -> None:
        def read(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("ingot.measure.side.huggingface._read", read)

    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    with pytest.raises(OutOfMemoryError, match=r"does not fit the GPU's memory; seen: CUDA out of memory"):
        load_class(llama, torch.float32, CPU, "less")
    fail(RuntimeError("DefaultCPUAllocator: can't allocate memory"))  # a sweep's limit, by its words
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_class(llama, torch.float32, CPU, "less")
    fail(RuntimeError())
    with pytest.raises(CheckpointError, match="RuntimeError"):
        load_class(llama, torch.float32, CPU, "less")


@pytest.mark.parametrize("named", ["float32", "bfloat16"])
def test_the_class_computes_in_the_dtype_of_the_weights(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the config says: on a GPU, where Ingot does."""
    from ingot.measure.side import huggingface

    save_model(tiny_config("llama"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', f'"dtype": "{named}"'))
    gpu = torch.device("cuda")
    assert huggingface.class_dtype(tmp_path, "auto", gpu, is_random=False) == torch.float32
    assert huggingface.class_dtype(tmp_path, "auto", gpu, is_random=True) == getattr(torch, named)
    assert huggingface.class_dtype(tmp_path, "auto", CPU, is_random=True) == torch.float32


def test_a_sweep_rates_the_cache_that_it_measures(chatter: Path, tmp_path: Path) -> None:
    """An 8-bit cache has a perplexity of its own."""
    data = tmp_path / "text.txt"
    data.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    quality = DataQuality(str(data))
    spec = SideSpec(path=str(chatter), device="cpu")
    reported = [quality(spec.replace(kv_dtype=kv_dtype))["perplexity"] for kv_dtype in ("model", "int8")]
    assert reported[0] != reported[1]
    assert reported[0] == quality(spec)["perplexity"]


def test_the_runtime_that_a_spec_asks_for() -> None:
    spec = SideSpec("engine", memory_fraction=0.5, kv_dtype="int8")
    found = spec.replace(batch_invariant=True).runtime()
    assert (found.memory_fraction, found.kv_dtype, found.batch_invariant) == (0.5, "int8", True)
    assert (found.cache_tokens, found.token_budget) == (None, type(found)().token_budget)


def test_two_sides_that_are_open_at_once_take_the_cache_of_one_request(llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    data.write_text('{"token_ids": [1, 2, 3, 4]}\n')
    spec = SideSpec(str(llama), device="cpu", max_seq_len=64)
    record = divergence(spec, spec, read_data(data), limits_for("divergence")).record
    runtimes = [side["facts"]["runtime"] for side in record["sides"]]
    assert [one["cache_tokens"] - one["block_size"] for one in runtimes] == [64, 64]
