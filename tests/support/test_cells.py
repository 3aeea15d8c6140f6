"""Every model in every precision: built, loaded, near the model's own logits, run beside another request.

These are the cells of the README's first table; the other tables name tests that were there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from recipes.vision.draw import png
from tests.e2e.tiny import write_tiny
from tests.encoders.speech import FRAMES, MELS, write_speech
from tests.tiny_models import random_ids, save_model, tiny_config
from tests.vision.files import TINY, pixels, write_files

PRECISIONS = (
    "w8a16",
    "w4a16",
    "w8a8",
    "w8a8-fp8",
    "w4a8",
    "rptq-w8a8",
    "rptq-w4a8",
    "rptq-w4a4",
    "int8 cache",
)
TEXT = ("gpt2", "llama", "mistral", "qwen", "qwen2", "qwen3", "gemma2", "gemma3", "opt")
GROUPS = {"w4a16": 32, "w4a8": 64} | dict.fromkeys(("rptq-w8a8", "rptq-w4a8", "rptq-w4a4"), 32)
OFF = {
    "w8a16": 0.04,
    "w8a8": 0.05,
    "w8a8-fp8": 0.2,
    "rptq-w8a8": 0.25,
    "rptq-w4a4": 0.65,
    "int8 cache": 0.03,
}  # of logits
NOT_ROTATED = ("gpt2", "opt", "gemma2", "gemma3", "whisper", "minigpt4")  # by what w4a8 would do
GREEDY = SamplingParams(max_new_tokens=3, ignore_eos=True)
IDS = random_ids(24, seed=5)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint with random weights, a prompt for it, and samples to calibrate with."""

    checkpoint: Path
    prompt: Prompt
    samples: Path


def _records(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _text(kind: str, folder: Path) -> Tiny:
    if kind == "qwen":
        write_tiny(folder / kind)
    else:
        save_model(tiny_config(kind), folder / kind, seed=3)
    records = [{"token_ids": random_ids(60, seed=n)} for n in range(6)]
    return Tiny(folder / kind, Prompt([IDS]), _records(folder, records))


def _speech(folder: Path) -> Tiny:
    write_speech(folder / "whisper")
    noise = torch.Generator().manual_seed(1)
    for name in range(4):
        sound = 0.2 * torch.randn(FRAMES * 160, generator=noise)
        soundfile.write(folder / f"{name}.wav", sound.numpy(), 16000)
    records = [{"audio": f"{n}.wav", "token_ids": random_ids(40, seed=n)} for n in range(4)]
    features = torch.randn(MELS, FRAMES, generator=noise)
    return Tiny(folder / "whisper", Prompt([Input(features), IDS]), _records(folder, records))


def _pictures(folder: Path) -> Tiny:
    tiny = write_files(folder)
    noise = torch.Generator().manual_seed(1)
    for name in range(4):
        values = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8, generator=noise)
        (folder / f"{name}.png").write_bytes(png(values))
    records = [{"image": f"{n}.png", "token_ids": random_ids(40, seed=n)} for n in range(4)]
    return Tiny(tiny.file, Prompt([IDS[:4], Input(pixels(TINY, 1)[0]), IDS]), _records(folder, records))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """tiny("llama"): made once."""

    @cache
    def made(kind: str) -> Tiny:
        folder = tmp_path_factory.mktemp(kind)
        make = {"whisper": _speech, "minigpt4": _pictures}.get(kind) or partial(_text, kind)
        return make(folder)

    return made


@pytest.fixture(scope="module")
def exact(tiny: Callable[[str], Tiny]) -> Callable[[str], torch.Tensor]:
    """exact("llama"): the checkpoint's logits."""

    @cache
    def logits(kind: str) -> torch.Tensor:
        with LLM(tiny(kind).checkpoint, "cpu") as llm:
            return llm.logits(tiny(kind).prompt)

    return logits


@pytest.mark.parametrize("kind", [*TEXT, "whisper", "minigpt4"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_built_and_run(
    tiny: Callable[[str], Tiny],
    exact: Callable[[str], torch.Tensor],
    tmp_path: Path,
    precision: str,
    kind: str,
) -> None:
    model = tiny(kind)
    options: dict[str, Any] = {"kv_dtype": "int8"}
    if precision != "int8 cache":
        quant = QuantConfig(precision, GROUPS.get(precision, 0))
        if kind in NOT_ROTATED:
            quant = quant.replace(rotation=False)
        options = {"quant": quant}
        if quant.calibrated:
            options |= {"calib": model.samples, "calib_samples": 4}
    engine = build(model.checkpoint, tmp_path / "engine", device="cpu", proof=False, **options)
    with LLM(engine, "cpu", runtime=RuntimeConfig(prefix_reuse=False)) as llm:
        found, own = llm.logits(model.prompt), exact(kind)
        off = float((found - own).norm() / own.norm())
        assert 1e-3 < off < OFF.get(precision, 0.5)
        first, _ = llm.generate([model.prompt, Prompt([IDS[:7]])], GREEDY)
        assert first.token_ids[0] == int(found[-1].argmax())
