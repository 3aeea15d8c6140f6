"""An engine of a config's shape, filled with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import CheckpointError, ConfigError, RequestError
from ingot.models.model_registry import find_architecture
from recipes.random_checkpoint import SHAPES as RECIPE_SHAPES
from recipes.random_checkpoint import write_checkpoint, write_samples

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_it_generates_and_is_the_same_for_the_same_seed(tmp_path: Path, tied: bool) -> None:
    config = write_config(tmp_path, tie_word_embeddings=tied)
    first, same, other = (LLM.from_config(config, "cpu", max_batch_size=2, seed=s) for s in (1, 1, 2))
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    output = first.generate([3, 4, 5], params)[0]
    assert (len(output.token_ids), output.text) == (5, None)
    logits = [llm.logits([3, 4, 5]) for llm in (first, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert torch.isfinite(logits[0]).all()


def test_weights_are_normal_and_norms_are_ones(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="bfloat16", attention_bias=True)
    llm = LLM.from_config(tmp_path, "cpu", max_seq_len=100)  # the folder
    model = llm.engine.model
    assert (llm.engine.manifest.build.dtype, llm.engine.dtype) == ("bf16", torch.float32)
    assert llm.executor.max_seq_len == 100
    assert torch.equal(model.norm.weight, torch.ones(64))
    for name, tensor in model.named_parameters():
        if tensor.dim() == 2:
            assert abs(float(tensor.std()) - 0.02) < 0.002, name
            assert abs(float(tensor.mean())) < 0.002, name
    assert float(model.get_parameter("layers.1.self_attn.qkv_proj.bias").std()) > 0.01


def test_a_gpt2_has_its_positions(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"} | sizes))
    llm = LLM.from_config(path, "cpu", dtype="fp16")
    assert llm.engine.dtype == torch.float16
    assert len(LLM.from_config(path, "cpu").generate([1, 2])[0].token_ids) == 62


def test_an_opt_in_blocks_runs_on_random_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    limits = {"max_position_embeddings": 40, "vocab_size": 50}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["OPTForCausalLM"], "model_type": "opt"} | sizes | limits))
    assert len(LLM.from_config(path, "cpu").generate([1, 2])[0].token_ids) == 38
    llm = LLM.from_config(path, "cpu", quant=QuantConfig("rptq-w4a8", 32))
    assert bool(torch.isfinite(llm.logits([1, 2, 3])).all())


def test_bad_configs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such config"):
        LLM.from_config(tmp_path / "absent.json", "cpu")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        LLM.from_config(tmp_path / "torn.json", "cpu")
    with pytest.raises(CheckpointError, match="unsupported architecture"):
        LLM.from_config(write_config(tmp_path, architectures=["Other"]), "cpu")
    with pytest.raises(ConfigError, match="exceeds the model's context length"):
        LLM.from_config(write_config(tmp_path), "cpu", max_seq_len=129)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b", 7_720_931_328),
        ("gpt2-medium", 354_823_168),
        ("gemma3-4b", 3_880_263_168),
        ("opt-6.7b", 6_658_473_984 - 2 * 4096),  # without the two rows that no position reads
    ],
)
def test_the_shapes_that_ship_are_those_of_the_benchmarks(name: str, parameters: int) -> None:
    hf = json.loads((SHAPES / f"{name}.json").read_text())
    architecture = find_architecture(hf["architectures"])
    build = BuildConfig("fp16", 1, 1024)
    model = architecture.empty_model(architecture.read_config(hf), build, QuantConfig())
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_many_streams_give_what_generate_gives(tmp_path: Path) -> None:
    llm = LLM.from_config(write_config(tmp_path), "cpu", max_batch_size=2)
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 5, 1)]
    pieces: list[list[int]] = [[], [], []]
    for position, piece in llm.stream_many(prompts, params):
        pieces[position] += piece.token_ids
    assert pieces == [o.token_ids for o in llm.generate(prompts, params)]
    stream = llm.stream_many(prompts, params)
    next(stream)
    stream.close()
    assert not llm.executor.has_work
    with pytest.raises(RequestError, match="prompt 2: the prompt is empty"):
        llm.stream_many([[1], []])


@pytest.mark.parametrize("scheme", ["rptq-w8a8", "rptq-w4a4"])
def test_a_shape_of_rptq_has_drawn_numbers_and_orders(tmp_path: Path, scheme: str) -> None:
    """Which a checkpoint would need samples for."""
    config = write_config(tmp_path)
    first, same = (LLM.from_config(config, "cpu", quant=scheme, max_batch_size=2) for _ in range(2))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    assert first.generate([5, 6, 7], params)[0].token_ids == same.generate([5, 6, 7], params)[0].token_ids
    order = first.engine.model.layers[0].mlp.gate_up_proj.order  # type: ignore[union-attr]
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()  # type: ignore[operator, union-attr]
    assert bool(torch.isfinite(first.logits([5, 6, 7])).all())


def test_the_random_checkpoint_of_the_benchmarks_builds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "tiny")
    llm = LLM(build(tmp_path / "checkpoint", tmp_path / "engine"), device="cpu")
    config = llm.engine.manifest.model
    assert config.hidden_size == RECIPE_SHAPES["tiny"]["hidden_size"]
    assert llm.engine.manifest.build.dtype == "fp16"
    output = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5))[0]
    assert len(output.token_ids) == 5
    assert output.text is None
    assert torch.isfinite(llm.logits([1, 2, 3])).all()


def test_its_samples_calibrate(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "tiny")
    write_samples(tmp_path / "samples.jsonl", RECIPE_SHAPES["tiny"]["vocab_size"], samples=3, length=20)
    found = {"quant": QuantConfig("w8a8", method="smoothquant"), "calib": tmp_path / "samples.jsonl"}
    llm = LLM(build(tmp_path / "checkpoint", tmp_path / "engine", device="cpu", **found), device="cpu")
    entry = llm.engine.manifest.calibration
    assert entry is not None
    assert (entry.samples, entry.tokens) == (3, 60)
