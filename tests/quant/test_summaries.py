"""Summaries of engines in fewer bits are as good as those of the dense model, by ROUGE-L."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot import LLM, SamplingParams, build
from ingot.config.quant import QuantConfig
from ingot.evaluate.rouge import Rouge

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
HELDOUT = ROOT / "recipes" / "heldout.jsonl"

RougeL = Callable[[LLM], float]


@pytest.fixture(scope="module")
def rouge_l() -> RougeL:
    """The mean of greedy summaries of 20 news items that nothing was calibrated with."""
    lines = HELDOUT.read_text(encoding="utf-8").splitlines()[1::2]
    records = [one for one in map(json.loads, lines) if one["task"] == "summary"][:20]
    rouge, params = Rouge(), SamplingParams(max_new_tokens=80, temperature=0.0)

    def mean(llm: LLM) -> float:
        assert llm.chat_format is not None
        prompts = [llm.chat_format.prompt_ids(one["messages"], llm.tokenizer) for one in records]
        texts = [output.text for output in llm.generate(prompts, params)]
        pairs = zip(texts, records, strict=True)
        return sum(rouge.score(text, [one["answer"]])["rougeL"].f1 for text, one in pairs) / len(records)

    return mean


def test_they_are_within_a_point(rouge_l: RougeL, tmp_path: Path) -> None:
    calib = tmp_path / "calib.jsonl"
    lines = HELDOUT.read_text(encoding="utf-8").splitlines(keepends=True)
    calib.write_text("".join(lines[::2]), encoding="utf-8")

    def built(name: str, quant: QuantConfig) -> LLM:
        given = {"calib": calib, "calib_samples": 32, "device": "cpu", "proof": False}
        return LLM(build(POCKET, tmp_path / name, quant=quant, **given), "cpu")  # type: ignore[arg-type]

    dense = rouge_l(LLM(POCKET, "cpu"))
    found = {
        "w8a16": rouge_l(LLM(POCKET, "cpu", quant="w8a16")),
        "w8a8": rouge_l(LLM(POCKET, "cpu", quant="w8a8")),
        "w4a16, gptq": rouge_l(built("gptq", QuantConfig("w4a16", method="gptq"))),
    }
    assert dense > 90
    assert {name: value for name, value in found.items() if abs(value - dense) >= 1} == {}, dense
