"""MiniGPT-v2's file in the place of MiniGPT-4's projector."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.checkpoint.minigpt4_files import MiniGPT4Files, config_of
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.errors import CheckpointError

LORA = "llama_model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


def config(*names: str) -> None:
    stored = {f"projector.{name}": TensorInfo((4096, 5632), torch.float32, "p.pth") for name in names}
    files = MiniGPT4Files(Path("llm"), Path("vit.pth"), Path("p.pth"))
    config_of(files, {"model_type": "llama"}, stored)


def test_it_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="MiniGPT-v2, which is not supported") as caught:
        config("llama_proj.weight", LORA)
    assert caught.value.seen == f"1 LoRA tensors of its LLM, such as {LORA}"


def test_the_llama_2_variants_projector_is_not() -> None:
    with pytest.raises(CheckpointError, match=r"vit\.patch_embed"):
        config("llama_proj.weight", "llama_proj.bias")
