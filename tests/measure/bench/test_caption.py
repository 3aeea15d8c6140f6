"""``ingot bench caption``: pictures, batches and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, Input, Prompt
from ingot.errors import ConfigError
from ingot.measure.bench import caption_speed as captioning
from ingot.measure.bench.caption_speed import BEFORE, CaptionBench
from ingot.measure.bench.ceiling import Ceiling
from tests.e2e.terminal import ingot
from tests.vision.files import write_files

WORDS = ("--pictures", 3, "--new-tokens", 2, "--prompt-tokens", 20, "--repeats", 2, "--device", "cpu")


@pytest.fixture(autouse=True)
def ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Ceiling(10.0, 0.1, "fp32", 1, 1)
    monkeypatch.setattr("ingot.measure.bench.caption_speed.measure_ceiling", lambda device, dtype: made_up)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files")).file


def test_both_sides(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    words = ("bench", "caption", tiny, "--batch", "1,2", "--against", tiny, "--json-file", file, *WORDS)
    found = ingot(*words, "--json")
    assert found.exit_code == 0, found.stderr
    record = json.loads(found.stdout)
    assert json.loads(file.read_text()) == record
    assert (record["verb"], "decoding of files not counted" in record["method"]) == ("caption", True)
    assert [side["name"] for side in record["sides"]] == [f"{tiny}, first", f"{tiny}, second"]
    for side in record["sides"]:
        one, two = side["results"]
        for entry in (one, two):
            assert entry["tokens"] == 6
            assert entry["pictures_per_s"] == pytest.approx(3 / entry["seconds"]["p50"], rel=0.01)
            assert entry["output_tokens_per_s"] == pytest.approx(6 / entry["seconds"]["p50"], rel=0.02)
            assert 0 < entry["ttft_ms"]["least"] <= entry["ttft_ms"]["p90"] < 1e3 * entry["seconds"]["most"]
            per_s = entry["batch"] * 1e3 / entry["encoder_ms"]["p50"]
            assert entry["encoder_pictures_per_s"] == pytest.approx(per_s, rel=0.01)
            assert list(entry["stages_ms"]) == ["vit", "ln_vision", "qformer", "projector"]
    ratios = record["ratios"]
    ours, theirs = (side["results"][1]["encoder_ms"]["p50"] for side in record["sides"])
    assert ratios[1]["encoder"] == pytest.approx(theirs / ours, rel=0.01)
    assert [ratio["batch"] for ratio in ratios] == [1, 2]


def test_tables(tiny: Path) -> None:
    found = ingot("bench", "caption", tiny, "--batch", "2", *WORDS)
    assert found.exit_code == 0, found.stderr
    for text in ("3 pictures, 20 prompt tokens, 2 new", "TTFT ms", "qformer", "pictures/s"):
        assert text in found.stdout


def test_batches_and_pictures_of_a_turn(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture is asked about once a turn, with the same text, and no turn repeats one of another."""
    asked: list[list[Prompt]] = []
    stream = LLM.stream_many

    def noted(llm: LLM, prompts: Any, *args: Any) -> Any:
        asked.append(list(prompts))
        return stream(llm, prompts, *args)

    monkeypatch.setattr(LLM, "stream_many", noted)
    found = ingot("bench", "caption", tiny, "--batch", "2", *WORDS)
    assert found.exit_code == 0, found.stderr
    measured = asked[-6:]  # a turn to warm up, and two
    assert [len(prompts) for prompts in measured] == [2, 1] * 3
    prompts = [prompt for together in measured for prompt in together]
    shown = [part.features for prompt in prompts for part in prompt.parts if isinstance(part, Input)]
    assert len({one.numpy().tobytes() for one in shown}) == len(prompts) == 9
    assert len({str([p for p in one.parts if not isinstance(p, Input)]) for one in prompts}) == 1
    assert sum(len(part) for part in prompts[0].parts if isinstance(part, list)) == 20


@pytest.mark.parametrize("tokens", [1, 2, BEFORE, 141])
def test_prompts_of_any_length(tiny: Path, tokens: int) -> None:
    with LLM(tiny, "cpu") as llm:
        wanted = CaptionBench(1, (1,), tokens, 1)
        (prompt,) = captioning._prompts(llm, wanted, 1, (0,))
        ids = llm.prompt_ids(prompt)
        config = llm.engine.manifest.model.encoder
        assert config is not None
        assert len(ids) + 1 == wanted.longest(llm.engine.manifest.model) == tokens + config.max_positions + 1


def test_hooks_are_gone_behind_the_stages(tiny: Path) -> None:
    with LLM(tiny, "cpu") as llm:
        captioning._encoder_figures(llm, 2, CaptionBench(2, (2,), repeats=1))
        encoder: Any = llm.engine.model.encoder
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in encoder.children())


@pytest.mark.parametrize("value", ["pictures", "prompt_tokens", "new_tokens", "repeats"])
def test_numbers_below_one(value: str) -> None:
    with pytest.raises(ConfigError, match=f"to fix: {value}$"):
        CaptionBench().replace(**{value: 0})


def test_what_it_refuses(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    chat = Path(__file__).parents[3] / "models/pocket-chat"
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((chat,), "bench caption needs a model of pictures"),
        ((tiny, "--against", chat), "bench caption needs a model of pictures"),
        ((tiny, "--against", "hf"), "Hugging Face has no class of MiniGPT-4"),
        ((tiny, "--max-seq-len", 20), "longer than the engine's requests"),
        ((), "give either ENGINE_OR_CHECKPOINT or --random-weights"),
        ((tiny, "--batch", "0"), "batch"),
    ]
    for words, message in cases:
        found = ingot("bench", "caption", *words, *WORDS)
        assert (found.exit_code, message in found.stderr) == (2, True), found.stderr
