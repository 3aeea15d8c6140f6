"""``ingot bench latency --text``: the time of a character, from its arithmetic to the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import LLM, SamplingParams
from ingot.errors import ConfigError
from ingot.measure.bench.latency import TextLatency, character_figures
from ingot.measure.side.timed_run import Run
from tests.e2e.terminal import ingot

POCKET = Path(__file__).parents[3] / "models" / "pocket-chat"
TEXT = "What is 12 + 30? Tell me about the sea."


def test_seconds_per_character_are_those_of_a_run_over_an_answers_characters() -> None:
    def decode(ids: object) -> str:
        return "ab" * len(list(ids))  # type: ignore[call-overload]

    runs = [Run(s, (), (), (2, 4), token_ids=((1, 2), (3, 4, 5, 6))) for s in (3.0, 6.0, 18.0)]
    found = character_figures(runs, decode)
    assert found["characters"] == [6.0] * 3  # 4 and 8
    assert (found["s_per_character"]["mean"], found["s_per_character"]["p50"]) == (1.5, 1.0)


def test_answers_without_characters_have_no_time() -> None:
    found = character_figures([Run(1.0, (), (), (1,), token_ids=((1,),))], lambda ids: "")
    assert found == {"s_per_character": None, "characters": [0.0]}


def test_both_sides_answer_the_text_without_prefix_reuse(tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "r.json"
    file.write_text(TEXT, encoding="utf-8")
    words = ("--text", file, "--batch", "1,2", "--new-tokens", 6, "--repeats", 2, "--device", "cpu")
    result = ingot("bench", "latency", POCKET, *words, "--against", "hf", "--json-file", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    llm = LLM(POCKET, device="cpu")
    ids = llm.tokenizer.encode(TEXT)
    (answer,) = llm.generate([TEXT], SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
    written = len(llm.tokenizer.decode(answer.token_ids))
    assert record["wanted"]["prompt"] == ids
    assert record["wanted"]["prompt_tokens"] == len(ids)
    assert "the text as the prompt" in record["method"]
    assert record["sides"][0]["facts"]["runtime"]["prefix_reuse"] is False
    for side in record["sides"]:
        for entry in side["results"]:
            assert entry["characters"] == [written] * 2
            seconds = [run["seconds"] for run in entry["raw"]["all_new"]]
            mean = sum(seconds) / 2 / written
            assert entry["s_per_character"]["mean"] == pytest.approx(mean, abs=2e-6)
    ours, theirs = (side["results"][1]["s_per_character"]["mean"] for side in record["sides"])
    assert record["ratios"][1]["s_per_character"] == pytest.approx(theirs / ours, abs=1e-3)
    assert "s/character, mean" in result.stdout


def test_texts_that_cannot_be_used(tmp_path: Path, checkpoint: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ConfigError, match="empty"):
        TextLatency.of([], (1,), 4, 1)
    for words, reported in (
        ((POCKET, "--text", tmp_path / "none.txt"), "cannot be read"),
        (("--random-weights", checkpoint / "config.json", "--text", empty), "needs a tokenizer"),
    ):
        result = ingot("bench", "latency", *words, "--device", "cpu")
        assert result.exit_code == 2
        assert reported in result.stderr
