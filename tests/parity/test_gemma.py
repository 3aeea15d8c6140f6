"""Gemma in 16 bits, and Gemma-3's config and files of every era, beside Hugging Face's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from ingot import LLM, build
from ingot.device import parse_dtype
from ingot.engine.manifest import Manifest
from tests.parity.test_huggingface import SHARP, TOLERANCE, check, hf_logits, load, relative_error
from tests.tiny_models import edit_config, make_model, random_ids, randomize, save_model, tiny_config


@pytest.mark.parametrize(("kind", "dtype"), [("gemma2", "bf16"), ("gemma3", "bf16"), ("gemma3", "fp16")])
def test_gemma_in_16_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    """What is embedded and normed first is the class's to the bit: scale and weights round as there. Logits
    are no farther from those in fp32.
    """
    model = make_model(tiny_config(kind), seed=1).to(parse_dtype(dtype))
    model.save_pretrained(tmp_path)
    ids = random_ids(60, seed=1)
    llm = LLM(tmp_path, "cpu", compute_dtype=dtype)
    with llm.tap("embed_tokens", "layers.0.input_layernorm") as seen, torch.inference_mode():
        logits = llm.logits(ids)
        embedded = model.model.embed_tokens(torch.tensor(ids))
        normed = model.model.layers[0].input_layernorm(embedded)
    assert torch.equal(seen["embed_tokens"], embedded)
    assert torch.equal(seen["layers.0.input_layernorm"], normed)
    if kind == "gemma3":
        stored = model.get_parameter("model.layers.0.self_attn.q_norm.weight")
        kept = llm.engine.model.get_parameter("layers.0.self_attn.q_norm.weight")
        assert torch.equal(kept, 1 + stored.float()), "as a norm's weight, in fp32"
    theirs = hf_logits(model, ids)
    exact = hf_logits(model.float(), ids)
    ours, bound = (float((found - exact).square().mean().sqrt()) for found in (logits.float(), theirs))
    assert 0 < ours <= 1.25 * bound


def test_an_old_config_of_gemma3_reads_the_same(tmp_path: Path) -> None:
    """Two bases, a scaling of full layers and a pattern, for rope_parameters and layer_types."""
    model = save_model(tiny_config("gemma3", **SHARP), tmp_path, seed=1)
    old: dict[str, Any] = {"rope_theta": 1000.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 2}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    edit_config(tmp_path, "rope_parameters", "layer_types", **old)
    check(tmp_path, model, 40)


# Where the parts of a Gemma-3 with pictures stand: as transformers 5 writes them, and as they were published.
PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


@pytest.mark.parametrize("published", [True, False])
def test_the_text_half_of_a_gemma3_with_pictures(
    published: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tiny_config("gemma3", eos_token_id=[1, 90])
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95)
    model = randomize(Gemma3ForConditionalGeneration(config).eval(), seed=1)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if published:
        tensors = load_file(tmp_path / "model.safetensors")
        for ours, theirs in PUBLISHED.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    ids = random_ids(40, seed=5, vocab_size=95)
    assert relative_error(load(tmp_path).logits(ids), hf_logits(model, ids)) <= TOLERANCE
    assert "the text half alone is built" in caplog.text
    engine = build(tmp_path, tmp_path / "engine", device="cpu", quant="w8a16")  # compared by other code
    assert Manifest.read(engine).stop_ids == (1, 90)
