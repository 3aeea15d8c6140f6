"""An architecture from outside the package: one file of its own, one module that it registers in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ingot import LLM, build, verify
from ingot.errors import CheckpointError, ConfigError, EngineError
from ingot.measure.align.align_session import align
from ingot.models.llama import LLAMA
from ingot.models.model_registry import ARCHITECTURES, architecture_named, register
from tests.e2e.terminal import ingot
from tests.seams.dummy_model import CLASS, DUMMY, NAME, register_dummy
from tests.seams.registrations import patches, registrations, touched_files
from tests.tiny_models import make_model, random_ids, tiny_config

FILES = ("dummy_model.py",)
IDS = random_ids(12, seed=4)
RENAMED = {
    "model.embed_tokens.weight": "table",
    "model.norm.": "last_norm.",
    "lm_head.": "head.",
    "model.layers.": "blocks.",
    "input_layernorm.": "first_norm.",
    "post_attention_layernorm.": "second_norm.",
    "self_attn.q_norm.": "attention.query_norm.",
    "self_attn.k_norm.": "attention.key_norm.",
    "self_attn.o_proj.": "attention.out.",
    "self_attn.": "attention.",
    "mlp.": "feed.",
    "_proj.": ".",
}


def _renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(scope="module")
def original() -> torch.nn.Module:
    """Qwen3 computes what the dummy means."""
    return make_model(tiny_config("qwen3"), seed=2)


@pytest.fixture(scope="module")
def checkpoint(original: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    folder.mkdir()
    tensors = {_renamed(name): t.contiguous() for name, t in original.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    given = tiny_config("qwen3").to_dict()
    config = {key: given[key] for key in keys} | {"architectures": [CLASS], "model_type": NAME}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    register_dummy()
    yield
    ARCHITECTURES.remove(DUMMY)


@pytest.fixture(scope="module")
def engine(registered: None, checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "engine", dtype="fp32", device="cpu")


def test_a_model_takes_six_files_at_most() -> None:
    assert registrations(*FILES) == {"ingot.models.model_registry.register"}
    assert patches(*FILES) == []
    assert touched_files(*FILES) <= 6


def test_an_unregistered_architecture_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"unsupported architecture.*{CLASS}.*LlamaForCausalLM"):
        build(checkpoint, tmp_path / "engine", device="cpu")
    with pytest.raises(EngineError, match=rf"architecture is unknown; seen: {NAME}; allowed: .*llama"):
        architecture_named(NAME)


def test_two_architectures_of_one_name_are_refused() -> None:
    before = list(ARCHITECTURES)
    for name, classes in (("llama", (CLASS,)), (NAME, LLAMA.hf_names)):
        other = type(DUMMY)(name, classes, NAME, DUMMY.keys, DUMMY.config_from_hf, DUMMY.weight_map)
        with pytest.raises(ConfigError, match="two architectures of one name"):
            register(other)
    assert before == ARCHITECTURES


def test_an_engine_of_it_is_proven_and_computes_what_it_means(
    engine: Path, checkpoint: Path, original: torch.nn.Module
) -> None:
    assert verify(engine, "cpu", note=False, source=checkpoint).verdict == "proven"
    answer = LLM(engine, "cpu", max_batch_size=2).generate([IDS], max_new_tokens=4)[0].answers[0]
    own = original.generate(  # type: ignore[operator]
        torch.tensor([IDS]), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert list(answer.token_ids) == own[0, len(IDS) :].tolist()
    report = align(engine, checkpoint, [IDS], steps=1, device="cpu", original="ingot")
    assert report.aligned, report.first_stage


def test_verbs_take_it(engine: Path, checkpoint: Path) -> None:
    shown = ingot("inspect", engine)
    assert shown.exit_code == 0, shown.stderr
    assert NAME in shown.stdout
    planned = ingot("plan", checkpoint)
    assert planned.exit_code == 0, planned.stderr
    assert "weights" in planned.stdout
