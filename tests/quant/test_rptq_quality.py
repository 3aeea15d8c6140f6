"""RPTQ where three channels are 30 times louder: by KL on conversations that were not calibrated with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingot import LLM, build
from ingot.config.quant import QuantConfig
from ingot.quant.rounding import dequantize, quantize
from tests.quant.loud_pocket import LINEAR, POCKET, ROOT, write_loud, write_pocket
from tests.quant.models import divergence

BLOCK = 32  # the model's hidden states have 256 channels
Cost = Callable[..., float]


@pytest.fixture(scope="module")
def loud_pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud(tmp_path_factory.mktemp("loud") / "checkpoint")


@pytest.fixture(scope="module")
def in_4_bits(loud_pocket: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers' weights rounded to 4 bits in groups of as many columns."""
    tensors = load_file(loud_pocket / "model.safetensors")
    near = {
        name: dequantize(quantize(tensor, 4, BLOCK)) if name.endswith(LINEAR) else tensor
        for name, tensor in tensors.items()
    }
    return write_pocket(tmp_path_factory.mktemp("narrow") / "checkpoint", near)


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cost]:
    """KL in nats from the pocket model of a checkpoint's engine."""
    root = tmp_path_factory.mktemp("engines")
    lines = (ROOT / "recipes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    calib = root / "calib.jsonl"
    calib.write_text("".join(lines[::2]), encoding="utf-8")
    exact = LLM(POCKET, "cpu")
    chat, tokenizer = exact.chat_format, exact.tokenizer
    assert chat is not None
    prompts = [chat.prompt_ids(json.loads(line)["messages"], tokenizer) for line in lines[1::40]]
    wanted = [exact.logits(ids).log_softmax(-1) for ids in prompts]

    def of(name: str, checkpoint: Path, quant: QuantConfig, samples: int = 64) -> float:
        given = {"calib": calib, "calib_samples": samples} if quant.calibrated else {}
        folder = build(checkpoint, root / name, quant=quant, device="cpu", proof=False, **given)  # type: ignore[arg-type]
        llm = LLM(folder, "cpu")
        near = [llm.logits(ids).log_softmax(-1) for ids in prompts]
        return sum(divergence(a, b) for a, b in zip(wanted, near, strict=True)) / len(prompts)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield of
    torch.set_num_threads(threads)


def test_clusters_beat_one_static_scale(loud_pocket: Path, cost: Cost) -> None:
    found = {
        "static": cost("static", loud_pocket, QuantConfig("w8a8", activations="static"), samples=32),
        "rptq": cost("rptq8", loud_pocket, QuantConfig("rptq-w8a8", BLOCK), samples=32),
    }
    # On one core: 1.7e-2 and 1.6e-3.
    assert found["rptq"] < 0.3 * found["static"], found


def test_in_4_bits_they_beat_plain_rounding(loud_pocket: Path, in_4_bits: Path, cost: Cost) -> None:
    """Plain W4A8 is weights rounded in the same groups, and activations with a static scale, or by token."""
    found = {
        "static": cost("narrow-static", in_4_bits, QuantConfig("w8a8", activations="static")),
        "dynamic": cost("narrow-dynamic", in_4_bits, QuantConfig("w8a8")),
        "rptq": cost("rptq4", loud_pocket, QuantConfig("rptq-w4a8", BLOCK)),
        "rounded": cost("rptq4-rounded", loud_pocket, QuantConfig("rptq-w4a8", BLOCK, method="round")),
    }
    # On one core: 2.2e-2, 4.0e-3, 2.6e-3 and 3.9e-3.
    assert found["rptq"] < 0.5 * found["static"], found
    assert found["rptq"] < found["dynamic"], found
    assert found["rptq"] < found["rounded"], found
