"""``ingot align``: what it prints, its exit codes, and what it says of bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import build
from ingot.align.measure import measure, measure_logits
from ingot.align.session import align
from ingot.align.stages import LAYER_STAGES, stage_names
from ingot.errors import DeviceError, RequestError
from tests.align.conftest import Spoil, Weights
from tests.e2e.terminal import ingot

IDS = ("--ids", "--prompt", "5 17 3 80 41", "--steps", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def engine(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LLaMA as an engine."""
    target = tmp_path_factory.mktemp("engine") / "llama"
    return build(originals["llama"], target, device="cpu", max_batch_size=2)


@pytest.fixture
def wrong(spoil: Spoil) -> Path:
    def change(weights: Weights) -> None:
        weights["model.layers.1.mlp.down_proj.weight"] *= 2

    return spoil("llama", change)


def test_aligned(engine: Path, originals: dict[str, Path]) -> None:
    result = ingot("align", engine, "--reference", originals["llama"], *IDS)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "aligned"
    assert "reference:   Hugging Face's LlamaForCausalLM, fp32" in result.stdout
    assert "noise floor: fp64 against fp32" in result.stdout
    assert "top-1 100.0%" in result.stdout
    kinds = [words[0].split(".")[-1] for words in table(result.stdout)]
    assert kinds == ["embedding", *LAYER_STAGES, "final_norm", "logits", "served"]
    assert result.stdout.count("worst of 2 layers") == len(LAYER_STAGES)
    assert "stop ids: equal, none (generate of Hugging Face's class)" in result.stdout


def test_every_stage(engine: Path, wrong: Path, originals: dict[str, Path]) -> None:
    for given, code in ((engine, 0), (wrong, 1)):
        result = ingot("align", given, "--reference", originals["llama"], *IDS, "--all")
        assert result.exit_code == code
        assert [words[0] for words in table(result.stdout)] == [*stage_names(2), "served"]
        assert "…" not in result.stdout


def table(text: str) -> list[list[str]]:
    """The words of each line of the stages."""
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:2] == ["stage", "step"])
    return lines[start + 1 : next(i for i, words in enumerate(lines) if words[:2] == ["greedy", "ids:"])]


def test_diverged(wrong: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = ingot("align", wrong, "--reference", originals["llama"], *IDS, "--html", page)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "diverged at layers.1.mlp, step 0"
    assert "beyond, wrong alone" in result.stdout
    assert [words[0] for words in table(result.stdout)] == [
        *("…", "layers.1.attention", "layers.1.residual", "layers.1.post_norm", "layers.1.mlp", "…"),
        *("logits", "served"),
    ]
    assert "8 earlier stages within the limits" in result.stdout
    assert "2 later stages beyond the limits too" in result.stdout
    assert "first bad stage: layers.1.mlp (prompt 1, step 0, the prompt itself)" in result.stdout
    assert "The module is wrong by itself" in result.stdout
    assert "expected 5x32 float32  mean" in result.stdout
    assert "<!doctype html>" in page.read_text()


def test_json(wrong: Path, originals: dict[str, Path]) -> None:
    result = ingot("align", wrong, "--reference", originals["llama"], *IDS, "--json")
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert value["first_stage"] == "layers.1.mlp"
    assert value["first"]["wrong_alone"] is True
    assert {"difference", "alone", "floor", "limit", "bad"} <= set(value["rows"][0])


def test_chat(originals: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": "hello"}\n')
    command = (
        "align",
        originals["qwen"],
        "--reference",
        originals["qwen"],
        "--data",
        data,
        "--device",
        "cpu",
    )
    result = ingot(*command, "--steps", "0")
    assert result.exit_code == 0
    assert "prompt 1, rendered prompt: equal (the checkpoint's files)" in result.stdout
    assert "prompt 2, token ids: equal" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reference", "nowhere/at/all"), "nowhere"),
        (("--reference", "{engine}"), "the reference is an engine"),
        (("--reference", "{llama}", "--original", "theirs"), "unknown original"),
        (("--reference", "{llama}", "--dtype", "int8"), "unknown dtype"),
        (
            ("--reference", "{llama}", "--steps", "500", "--ids", "--prompt", "1"),
            "exceed the engine's max_seq_len",
        ),
        (("--reference", "{llama}"), "no default prompt"),
        (("--reference", "{llama}", "--prompt", "Hello"), "no tokenizer"),
        (("--reference", "{llama}", "--ids", "--prompt", "1 999"), "outside the vocabulary"),
        (("--reference", "{qwen}", "--ids", "--prompt", "1", "--original", "hf"), "no class for 'qwen'"),
        (("--reference", "{gpt2}", "--ids", "--prompt", "1"), "a different model"),
        (("--reference", "{llama}", "--html", "no/such/folder.html"), "no such folder"),
        (("--reference", "{llama}", "--prompt", "a", "--data", "b"), "not both"),
        ((), "--reference"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str, engine: Path, originals: dict[str, Path]) -> None:
    places = {name: str(path) for name, path in originals.items()} | {"engine": str(engine)}
    result = ingot("align", engine, *(word.format(**places) for word in words), "--device", "cpu")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_without_transformers(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "transformers" else whole(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(DeviceError, match=r"ingot\[align\]"):
        align(originals["llama"], originals["llama"], [[1, 2]], device="cpu")
    assert align(
        originals["llama"], originals["llama"], [[1, 2]], steps=0, device="cpu", original="ingot"
    ).aligned
    with pytest.raises(RequestError, match="steps"):
        align(originals["llama"], originals["llama"], [[1, 2]], steps=-1)


def test_measures() -> None:
    a = torch.tensor([[3.0, 4.0], [300.0, 400.0]])
    b = torch.tensor([[3.0, 4.5], [300.0, 400.0]])
    found = measure(a, b)
    assert found.max_abs == 0.5
    assert found.relative == pytest.approx((0.1**2 / 2) ** 0.5)
    assert (found.token, found.channel) == (0, 1)
    assert measure(a, a).relative == 0
    assert measure(a, a).cosine == pytest.approx(1)
    infinite = torch.tensor([[float("inf"), 1.0]])
    assert measure(infinite, infinite).max_abs == 0
    assert measure(infinite, torch.ones(1, 2)).max_abs == float("inf")
    assert measure(a, a * float("nan")).relative == float("inf")
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    assert measure_logits(logits, logits.flip(0)).top1 == 0
    assert measure_logits(logits, logits + 7).kl == pytest.approx(0, abs=1e-12)
