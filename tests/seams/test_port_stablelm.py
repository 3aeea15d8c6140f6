"""StableLM, ported from outside the package: logits and greedy ids are Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StableLmConfig

from ingot import LLM, SamplingParams, build, verify
from ingot.errors import CheckpointError
from ingot.models.model_registry import ARCHITECTURES
from tests.seams.port_stablelm import MODEL, register_stablelm
from tests.seams.registrations import patches, registrations, touched_files
from tests.tiny_models import edit_config, random_ids, randomize

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
FILES = ("port_stablelm.py",)
IDS = random_ids(24, seed=5)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register_stablelm()
    yield
    ARCHITECTURES.remove(MODEL)


def saved(folder: Path, **changes: Any) -> PreTrainedModel:
    config = StableLmConfig(**(SIZES | changes))
    model = randomize(AutoModelForCausalLM.from_config(config).eval(), seed=1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def test_it_takes_one_file_and_one_registration() -> None:
    assert registrations(*FILES) == {"ingot.models.model_registry.register"}
    assert patches(*FILES) == []
    assert touched_files(*FILES) == 2


@pytest.mark.parametrize(
    "changes",
    [{"use_qkv_bias": True}, {"layer_norm_eps": 1e-2, "partial_rotary_factor": 0.5}],
    ids=["bias", "half"],
)
def test_logits_and_greedy_ids(changes: dict[str, Any], tmp_path: Path) -> None:
    model, prompt = saved(tmp_path, **changes), torch.tensor([IDS])
    llm = LLM(tmp_path, "cpu", max_batch_size=2)
    with torch.inference_mode():
        theirs = model(prompt).logits[0].float()
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )[0, len(IDS) :].tolist()
    assert float((llm.logits(IDS) - theirs).abs().max() / theirs.abs().max()) <= 1e-4
    assert len(set(ids)) > 1
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    assert llm.generate(IDS, params)[0].token_ids == ids


def test_the_old_form_of_its_config_and_an_engine_that_is_proven(tmp_path: Path) -> None:
    saved(tmp_path / "hf", use_qkv_bias=True)
    edit_config(tmp_path / "hf", "rope_parameters", rope_theta=10000, partial_rotary_factor=0.25)
    engine = build(tmp_path / "hf", tmp_path / "engine", dtype="fp32", device="cpu")
    assert verify(engine, "cpu", note=False, source=tmp_path / "hf").verdict == "proven"


@pytest.mark.parametrize("key", ["use_parallel_residual", "qk_layernorm"])
def test_layers_that_the_stack_has_not_are_refused(key: str, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **{key: True})
    with pytest.raises(CheckpointError, match=f"unknown to Ingot's stablelm.*{key}"):
        LLM(tmp_path, "cpu")
