"""Every verb knows an engine that hears: it works on it, or refuses with what to run instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import LLM
from ingot.errors import ConfigError
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_speech
from tests.unit.real_whisper import WHISPER

IDS = ("--ids", "1 5 9")
REFUSED = {  # arguments, with E for the engine, C for its checkpoint, D for a file of texts → what it says
    ("run", "E", *IDS): "ingot transcribe ENGINE FILE",
    ("chat", "E"): "ingot transcribe ENGINE FILE",
    ("explain", "E", *IDS): "ingot transcribe ENGINE FILE",
    ("eval", "perplexity", "E", "--data", "D"): "ingot eval wer ENGINE",
    ("eval", "divergence", "E", "--data", "D", "--against", "hf:C"): "ingot eval wer ENGINE",
    ("build", "C", "-o", "X", "--prove", "D"): "ingot eval wer ENGINE",
    ("bench", "latency", "E", "--device", "cpu"): "ingot bench transcribe ENGINE",
    ("bench", "throughput", "C", "--device", "cpu"): "ingot bench transcribe ENGINE",
    ("triton", "E", "-o", "X"): "ingot serve ENGINE",
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: "-".join(words[:2]))
def test_a_verb_of_text_says_what_to_run_instead(
    words: tuple[str, ...], tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"token_ids": [1, 5, 9, 30, 31]}\n')
    real = {"E": str(tiny_engine), "C": str(tiny_checkpoint), "D": str(data), "X": str(tmp_path / "new")}
    real["hf:C"] = f"hf:{tiny_checkpoint}"
    found = ingot(*(real.get(word, word) for word in words))
    assert found.exit_code == 2, found.output
    assert "needs a model of text" in found.output
    assert REFUSED[words] in " ".join(found.output.split())
    assert not (tmp_path / "new").exists()


def test_inspect_shows_the_encoder(tiny_engine: Path) -> None:
    shown = ingot("inspect", tiny_engine).output
    assert "whisper (a model of speech, cross)" in shown
    assert "2 layers, hidden 32, 4 heads, 48 wide" in shown
    assert "8 x any, at most 40 positions: 20.5 kB of encoder cache" in shown
    reported = json.loads(ingot("inspect", tiny_engine, "--json").output)
    assert reported["input_bytes"] == 40 * 2 * 2 * 32 * 4
    assert reported["model"]["encoder"]["max_positions"] == 40


@pytest.mark.parametrize(("vocabulary", "languages"), [(51864, "English"), (51866, "100")])
def test_inspect_counts_the_languages(tmp_path: Path, vocabulary: int, languages: str) -> None:
    write_speech(tmp_path, vocab_size=vocabulary)
    assert f"languages     {languages}\n" in ingot("inspect", tmp_path).output


@pytest.mark.slow
def test_plan_counts_large_v3(tmp_path: Path) -> None:
    """64 windows at once: their keys and values are five times the weights, and do not fit into 24 GB."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WHISPER["whisper-large-v3"]))
    asked = ("plan", config, "--dtype", "fp16", "--max-batch-size")
    reported = json.loads(ingot(*asked, "64", "--gpu", "24GiB", "--json").output)
    items = {(item["kind"], item["name"]): item["bytes"] for item in reported["items"]}
    weights = sum(size for (kind, _), size in items.items() if kind == "weights")
    assert weights == pytest.approx(2 * 1_543_490_560, rel=1e-3)
    assert items["encoders", "encoder cache"] == 64 * 1536 * 32 * 2 * 1280 * 2
    assert ingot(*asked, "64", "--gpu", "24GiB").exit_code == 1
    assert ingot(*asked, "64", "--gpu", "80GiB").exit_code == 0
    assert ingot(*asked, "16", "--gpu", "24GiB").exit_code == 0


def test_diff_names_a_layer_of_the_encoder(tiny_engine: Path, tmp_path: Path) -> None:
    write_speech(tmp_path / "other", seed=1)
    ingot("build", tmp_path / "other", "-o", tmp_path / "engine", "--device", "cpu", "--no-proof")
    shown = ingot("diff", tiny_engine, tmp_path / "engine")
    assert shown.exit_code == 1
    assert "encoder." in shown.output


def test_verify_tells_of_the_encoder(tiny_engine: Path) -> None:
    shown = ingot("verify", tiny_engine, "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    assert "log-mel" in shown.output


def test_inspect_names_the_languages_of_the_checkpoint(tmp_path: Path) -> None:
    named = {"lang_to_id": {"<|en|>": 50259, "<|de|>": 50261}, "is_multilingual": True}
    write_speech(tmp_path, vocab_size=51865)
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert "languages     en, de\n" in ingot("inspect", tmp_path).output


def test_a_conversation_needs_a_model_of_text(tiny_engine: Path) -> None:
    with pytest.raises(ConfigError, match=r"a conversation needs a model of text.*Transcriber"):
        LLM(tiny_engine, "cpu").chat([{"role": "user", "content": "Hello"}])
