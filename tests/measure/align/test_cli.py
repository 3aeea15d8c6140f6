"""``ingot align``: what it prints, its exit codes, and what it says of bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ingot import build
from ingot.errors import DeviceError, RequestError
from ingot.measure.align.align_session import align
from ingot.measure.align.stages.stage_names import LAYER_STAGES, stage_names
from tests.e2e.terminal import ingot
from tests.measure.align.conftest import Spoil, at

IDS = ("--ids", "5 17 3 80 41", "--steps", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def engine(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LLaMA as an engine."""
    target = tmp_path_factory.mktemp("engine") / "llama"
    return build(originals["llama"], target, device="cpu", max_batch_size=2)


@pytest.fixture
def wrong(spoil: Spoil) -> Path:
    return spoil("llama", at("model.layers.1.mlp.down_proj.weight", lambda weight: 2 * weight))


def test_aligned(engine: Path, originals: dict[str, Path]) -> None:
    result = ingot("align", engine, "--reference", originals["llama"], *IDS)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "aligned"
    for reported in (
        "reference:   Hugging Face's LlamaForCausalLM, fp32",
        "noise floor: fp64 against fp32",
        "top-1 100.0%",
        "stop ids: equal, none (generate of Hugging Face's class)",
    ):
        assert reported in result.stdout
    kinds = [words[0].split(".")[-1] for words in table(result.stdout)]
    assert kinds == ["embedding", *LAYER_STAGES, "final_norm", "logits", "served"]
    assert result.stdout.count("worst of 2 layers") == len(LAYER_STAGES)


def test_every_stage(engine: Path, wrong: Path, originals: dict[str, Path]) -> None:
    for given, code in ((engine, 0), (wrong, 1)):
        result = ingot("align", given, "--reference", originals["llama"], *IDS, "--all")
        assert result.exit_code == code
        assert [words[0] for words in table(result.stdout)] == [*stage_names(2), "served"]
        assert "…" not in result.stdout


def test_another_engine(engine: Path, wrong: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    """Of the same checkpoint in another dtype, of a wrong one, and one whose hidden states are rotated."""
    given = {"device": "cpu", "proof": False}
    half = build(originals["llama"], tmp_path / "half", dtype="fp16", **given)
    for one, code, last in ((half, 0, "aligned"), (wrong, 1, "diverged at layers.1.mlp, step 0")):
        result = ingot("align", one, "--reference", engine, *IDS)
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (code, last)
        assert "reference:   the engine llama, fp32" in result.stdout
        assert "(the other engine)" in result.stdout
    turned = build(originals["llama"], tmp_path / "turned", quant="w4a8", **given)
    result = ingot("align", turned, "--reference", engine, *IDS)
    assert result.exit_code == 2
    assert "one of the two engines are rotated" in result.stderr


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
    assert [words[0] for words in table(result.stdout)] == [
        *("…", "layers.1.attention", "layers.1.residual", "layers.1.post_norm", "layers.1.mlp", "…"),
        *("logits", "served"),
    ]
    for reported in (
        "beyond, wrong alone",
        "8 earlier stages within the limits",
        "2 later stages beyond the limits too",
        "first bad stage: layers.1.mlp (prompt 1, step 0, the prompt itself)",
        "The module is wrong by itself",
        "expected 5x32 float32  mean",
    ):
        assert reported in result.stdout
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
    sides = (originals["qwen"], "--reference", originals["qwen"])
    result = ingot("align", *sides, "--data", data, "--device", "cpu", "--steps", "0")
    assert result.exit_code == 0
    assert "prompt 1, rendered prompt: equal (the checkpoint's files)" in result.stdout
    assert "prompt 2, token ids: equal" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reference", "nowhere/at/all"), "nowhere"),
        (("--reference", "{engine}"), "the reference is the engine itself"),
        (("--reference", "{llama}", "--original", "theirs"), "unknown original"),
        (("--reference", "{llama}", "--dtype", "int8"), "unknown dtype"),
        (
            ("--reference", "{llama}", "--steps", "500", "--ids", "1"),
            "exceed the engine's max_seq_len",
        ),
        (("--reference", "{llama}"), "no default prompt"),
        (("--reference", "{llama}", "--prompt", "Hello"), "no tokenizer"),
        (("--reference", "{llama}", "--ids", "1 999"), "outside the vocabulary"),
        (("--reference", "{qwen}", "--ids", "1", "--original", "hf"), "no class for 'qwen'"),
        (("--reference", "{gpt2}", "--ids", "1"), "a different model"),
        (("--reference", "{llama}", "--html", "no/such/folder.html"), "no such folder"),
        (("--reference", "{llama}", "--prompt", "a", "--data", "b"), "give --prompt, --ids or a file"),
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
    sides, own = (originals["llama"], originals["llama"], [[1, 2]]), {"device": "cpu", "original": "ingot"}
    with pytest.raises(DeviceError, match=r"\[align\]"):
        align(*sides, device="cpu")
    assert align(*sides, steps=0, **own).aligned
    with pytest.raises(RequestError, match="steps"):
        align(*sides, steps=-1)
