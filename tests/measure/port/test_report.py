"""``ingot port``: what it finds of models that Ingot does not have, and what it refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config, PretrainedConfig, StableLmConfig

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.measure.port import nearest
from ingot.measure.port.config_reading import read_with
from ingot.measure.port.port_files import first_of_each
from ingot.measure.port.port_report import port_report
from ingot.measure.port.tensor_patterns import TensorPattern, pattern_of, tensor_patterns
from ingot.models import model_registry
from ingot.models.gpt2 import GPT2
from ingot.models.llama import LLAMA
from ingot.models.model_registry import ARCHITECTURES
from ingot.models.qwen2 import QWEN2
from tests.e2e.terminal import ingot
from tests.tiny_models import edit_config, save_model, tiny_config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def saved(config: PretrainedConfig, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stablelm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(StableLmConfig(**SIZES, use_qkv_bias=True), tmp_path_factory.mktemp("stablelm"))


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(Phi3Config(**SIZES, sliding_window=7), tmp_path_factory.mktemp("phi3"))


def reported(folder: Path, *flags: object) -> dict[str, Any]:
    done = ingot("port", folder, "--json", *flags)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def rules(report: dict[str, Any]) -> dict[str, str | None]:
    return {one["pattern"]["name"]: one["rule"] for one in report["nearest"]["tensors"]["tensors"]}


def test_patterns_have_a_letter_for_each_number() -> None:
    assert (
        pattern_of("model.layers.11.mlp.experts.3.w1.weight") == "model.layers.{i}.mlp.experts.{j}.w1.weight"
    )
    assert pattern_of("h.0") == "h.{i}"
    assert pattern_of("0.conv1.weight") == "{i}.conv1.weight"


def test_stablelm_is_near_qwen2_and_its_norms_and_rotary_share_are_open(stablelm: Path) -> None:
    report = reported(stablelm)
    nearest = report["nearest"]
    assert report["registered"] is None
    assert nearest["architecture"] == "qwen2"  # LLaMA's names with biases of q, k and v
    assert 0 < report["others"][0][1] <= nearest["score"] < 1
    reading = nearest["reading"]
    assert reading["renamed"] == {"layer_norm_eps": "rms_norm_eps"}
    assert reading["config"]["norm_eps"] == 1e-5
    assert reading["unknown"] == {"use_qkv_bias": "True"}
    assert [one["key"] for one in reading["refused"]] == ["rope_parameters.partial_rotary_factor"]
    unmatched = {name for name, rule in rules(report).items() if rule is None}
    norms = ("model.norm", "model.layers.{i}.input_layernorm", "model.layers.{i}.post_attention_layernorm")
    assert unmatched == {f"{name}.bias" for name in norms}
    assert len(report["open"]) == 5
    assert sum('norm="layer_norm"' in line for line in report["open"]) == 3


def test_modules_are_in_the_order_in_which_the_class_runs_them(phi3: Path) -> None:
    rows = [(row["name"], row["shape"]) for row in reported(phi3)["modules"]["rows"]]
    layer = [name.removeprefix("model.layers.{i}.") for name, _ in rows if "{i}" in name]
    layer = [name for name in layer if "dropout" not in name and "activation" not in name]
    attention = ["input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"]
    assert layer == [*attention, "post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj"]
    assert rows[0] == ("model.embed_tokens", [1, 8, 32])
    assert rows[-1] == ("lm_head", [1, 8, 97])
    assert ("model.layers.{i}.self_attn.qkv_proj", [1, 8, 64]) in rows


def test_fused_tensors_of_our_own_names_are_proposed(phi3: Path) -> None:
    report = reported(phi3)
    fused = [one for one in report["nearest"]["tensors"]["tensors"] if one["why"] is not None]
    assert [one["target"] for one in fused] == [
        "layers.{layer}.mlp.gate_up_proj.weight",
        "layers.{layer}.self_attn.qkv_proj.weight",
    ]
    assert fused[1]["pattern"] == {
        "name": "model.layers.{i}.self_attn.qkv_proj.weight",
        "shape": [64, 32],
        "count": 2,
        "other_shapes": 0,
    }
    assert report["open"] == []


def test_another_shape_is_not_proposed(phi3: Path, tmp_path: Path) -> None:
    with open_checkpoint(phi3) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    name = "model.layers.{}.self_attn.qkv_proj.weight"
    save_file(
        {**tensors, **{name.format(i): torch.zeros(60, 32) for i in (0, 1)}}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((phi3 / "config.json").read_text())
    report = reported(tmp_path)
    assert rules(report)["model.layers.{i}.self_attn.qkv_proj.weight"] is None
    assert any("qkv_proj.weight [60, 32]" in line for line in report["open"])
    assert any(line.startswith("rule without a tensor: Concat") for line in report["open"])


def test_gemma3_was_near_gemma2_and_its_two_bases_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an Ingot that does not have it."""
    others = [one for one in ARCHITECTURES if one.name != "gemma3"]
    for module in (model_registry, nearest):
        monkeypatch.setattr(module, "ARCHITECTURES", others)
    report = reported(saved(Gemma3TextConfig(**SIZES, head_dim=8), tmp_path))
    assert report["nearest"]["architecture"] == "gemma2"
    refused = report["nearest"]["reading"]["refused"]
    assert [one["key"] for one in refused] == ["rope_parameters"]
    assert "full_attention" in refused[0]["why"]
    assert report["modules"]["absent"] is None
    assert sum("qk_norm=True" in line for line in report["open"]) == 2


def test_few_layers_have_every_type() -> None:
    assert first_of_each([*"sssss", "f", *"ss"], 2) == ["s", "f"]
    assert first_of_each([*"sss"], 2) == ["s", "s"]
    assert first_of_each([{"a": 1}, [2], {"a": 1}, 3.5], 2) == [{"a": 1}, [2]]
    assert len(first_of_each([0] * 10**6, 2)) == 2


def test_text_names_counts_and_what_is_open(stablelm: Path) -> None:
    shown = ingot("port", stablelm).stdout
    assert "nearest: qwen2, score 0." in shown
    assert 'model.norm.weight [32] ×1: Rename("norm.weight", "model.norm.weight")' in shown
    assert "model.layers.{i}.input_layernorm.bias [32] ×2: unmatched" in shown
    assert "open: 5" in shown


def test_values_of_a_wrong_type_and_missing_keys_are_named() -> None:
    hf: dict[str, Any] = {"hidden_size": "wide", "num_attention_heads": 4, "hidden_act": "relu6"}
    reading = read_with(LLAMA, hf)
    assert {one.key for one in reading.refused} == {"hidden_size", "hidden_act"}
    assert set(reading.missing) == {"intermediate_size", "num_hidden_layers", "vocab_size"}
    assert reading.config is not None
    assert "num_key_value_heads" in reading.defaults


def test_a_key_that_a_family_knows_and_does_not_read_is_named() -> None:
    reading = read_with(LLAMA, {"pretraining_tp": 2, "hidden_size": 8})
    assert reading.unread == ("pretraining_tp",)


def test_a_registered_architecture_is_named(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path)
    done = ingot("port", tmp_path)
    assert done.exit_code == 0
    assert "Ingot has this architecture, llama" in done.stdout
    done = ingot("port", tmp_path, "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "nothing to port" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_registered_one_that_refuses_its_config_is_compared_with_itself(tmp_path: Path) -> None:
    save_model(tiny_config("qwen3"), tmp_path)
    edit_config(tmp_path, logit_scale=2)
    report = reported(tmp_path)
    assert report["registered"] == report["nearest"]["architecture"] == "qwen3"
    assert "logit_scale=2" in report["refused"]
    assert report["nearest"]["reading"]["unknown"] == {"logit_scale": "2"}


def test_without_transformers_it_goes_without_the_modules(
    stablelm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = __import__("importlib.util").util.find_spec
    gone = lambda name, *rest: None if name == "transformers" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr("ingot.measure.side.huggingface.importlib.util.find_spec", gone)
    report = port_report(stablelm)
    assert not report.modules.rows
    assert "transformers is not installed" in str(report.modules.absent)
    assert report.nearest is not None


def test_a_hostile_number_of_layers_is_not_built(stablelm: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((stablelm / name).read_bytes())
    edit_config(tmp_path, num_attention_heads=10**9)
    modules = reported(tmp_path)["modules"]
    assert "num_attention_heads 1000000000, more than 4096" in modules["absent"]


def test_files_that_are_no_checkpoint_are_refused(stablelm: Path, tmp_path: Path) -> None:
    def refused(text: str, exit_code: int) -> None:
        done = ingot("port", tmp_path)
        assert done.exit_code == exit_code, done.stderr
        assert text in done.stderr

    refused("has no config.json", 2)
    (tmp_path / "config.json").write_bytes(b"\x8f\x00ENCRYPTED\xff")
    refused("is not readable JSON", 1)
    config = json.loads((stablelm / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("no readable weights", 1)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    refused("truncated or damaged", 1)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for names in ([], "StableLmForCausalLM", 5, [5], None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
        refused("names no architecture", 1)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "a": [1]}))
    refused("no registered architecture shares", 1)


def test_a_pattern_has_the_most_frequent_shape() -> None:
    shapes = ((3,), (2,), (2,))
    tensors = {f"l.{i}.w": TensorInfo(s, torch.float32, Path("x")) for i, s in enumerate(shapes)}
    assert tensor_patterns(tensors) == [TensorPattern("l.{i}.w", (2,), 3, 1)]


def test_a_config_that_means_nothing_keeps_no_one_from_the_tensors(stablelm: Path) -> None:
    with open_checkpoint(stablelm) as checkpoint:
        patterns = tensor_patterns(checkpoint.tensors)
    assert len(patterns) == 18
    for value in (None, "x", [], {}, -1, True, 1e999, 10**30):
        hf = {
            "hidden_size": value,
            "num_hidden_layers": value,
            "rope_parameters": value,
            "layer_types": value,
        }
        for architecture in (LLAMA, QWEN2, GPT2):
            assert read_with(architecture, hf).idle is not None
