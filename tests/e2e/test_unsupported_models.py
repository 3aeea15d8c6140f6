"""An unsupported model is not built: one clear error names the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SmolLM3Config

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.errors import CheckpointError, IngotError, TokenizerError
from tests.e2e.tiny import write_tiny
from tests.tiny_models import edit_config, save_model, tiny_config

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(tiny_config("llama"), folder, seed=1)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "checkpoint"))


def refusal(folder: Path, kind: type[IngotError] = CheckpointError) -> str:
    """What ``build`` and ``LLM`` say, the same of both; nothing is left beside the checkpoint."""
    said = []
    for call in (lambda: build(folder, folder.parent / "engine", device="cpu"), lambda: LLM(folder, "cpu")):
        with pytest.raises(kind) as error:
            call()
        assert error.value.fix
        said.append(str(error.value))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert said[0] == said[1]
    return said[0]


def test_another_model_with_architectures_edited(tmp_path: Path) -> None:
    """SmolLM3 has LLaMA's tensors, and layers without rotary positions."""
    folder = tmp_path / "checkpoint"
    sizes = tiny_config("llama").to_dict()
    kept = {
        key: sizes[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    eos = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = SmolLM3Config(
        num_hidden_layers=4, num_key_value_heads=2, max_position_embeddings=128, **kept, **eos
    )
    save_model(config, folder, seed=1)
    assert "SmolLM3ForCausalLM" in refusal(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"])
    assert "model_type 'smollm3'" in refusal(folder)
    edit_config(folder, "model_type")
    assert "no_rope_layers=[1, 1, 1, 0]" in refusal(folder)
    edit_config(folder, "model_type", "no_rope_layers", "no_rope_layer_interval", "layer_types")
    build(folder, tmp_path / "engine", device="cpu")  # by all that is left, it is a LLaMA


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"eos_token_id": 97}, "eos_token_id in config.json"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ],
    ids=str,
)
def test_configs(copy: Path, changes: dict[str, Any], reported: str) -> None:
    edit_config(copy, **changes)
    assert reported in refusal(copy)
    with pytest.raises(CheckpointError, match=reported):  # config.json alone is enough
        read_setting(str(copy))


@pytest.mark.parametrize("eos", [97, [2, 97], -1, "</s>"], ids=repr)
def test_end_tokens_of_the_generation_config(copy: Path, eos: Any) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    text = refusal(copy)
    assert "eos_token_id in generation_config.json" in text
    assert "0 to 96" in text


def test_other_special_tokens_may_stand_for_nothing(copy: Path, tmp_path: Path) -> None:
    edit_config(copy, pad_token_id=-1, bos_token_id=97, eos_token_id=[96, 0])
    (copy / "generation_config.json").write_text(json.dumps({"pad_token_id": 97, "eos_token_id": None}))
    assert LLM(copy, "cpu").generate([1, 2])[0].token_ids


@pytest.mark.grid(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite(copy: Path, name: str, value: float, dtype: torch.dtype) -> None:
    path = copy / "model.safetensors"
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
    tensors[name][-1, -1] = value
    save_file(tensors, path, {"format": "pt"})
    text = refusal(copy)
    assert text.startswith(f"{name} has values that are not finite")
    assert ("1 NaN and 0 infinite" if value != value else "0 NaN and 1 infinite") in text


class TestTokenizers:
    @pytest.mark.parametrize(
        "name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
    )
    def test_a_vocabulary_that_is_missing(self, copy: Path, name: str) -> None:
        (copy / name).write_text("{}")
        text = refusal(copy, TokenizerError)
        assert name in text
        assert "tokenizer.json" in text

    def test_a_missing_qwen_tiktoken(self, tmp_path: Path) -> None:
        folder = write_tiny(tmp_path / "checkpoint")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
        (folder / "qwen.tiktoken").unlink()
        assert "allowed: qwen.tiktoken;" in refusal(folder, TokenizerError)

    def test_a_checkpoint_of_token_ids_alone(self, copy: Path) -> None:
        assert LLM(copy, "cpu").tokenizer is None


@pytest.mark.parametrize("quant", ["none", "w8a16", "w4a8"])
def test_of_qwen_v1_in_every_way_of_packing(tmp_path: Path, quant: str) -> None:
    folder = write_tiny(tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.weight"][0] = NAN
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"transformer\.ln_f\.weight has values that are not finite"):
        build(folder, tmp_path / "engine", device="cpu", quant=quant)
    assert not (tmp_path / "engine").exists()
