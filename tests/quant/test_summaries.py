"""Summaries of engines in fewer bits are as good as those of the dense model, by ROUGE-L."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.measure.evaluate.rouge import Rouge
from tests.quant.pocket import HELDOUT, POCKET, Pocket


def rouge_l(llm: LLM) -> float:
    """The mean of greedy summaries of 20 news items that nothing was calibrated with."""
    lines = HELDOUT.read_text(encoding="utf-8").splitlines()[1::2]
    records = [one for one in map(json.loads, lines) if one["task"] == "summary"][:20]
    rouge, params = Rouge(), SamplingParams(max_new_tokens=80, temperature=0.0)
    texts = [output.text for output in llm.chat([one["messages"] for one in records], params)]
    pairs = zip(texts, records, strict=True)
    return sum(rouge.score(text, [one["answer"]])["rougeL"].f1 for text, one in pairs) / len(records)


@pytest.fixture(scope="module")
def dense() -> float:
    return rouge_l(LLM(POCKET, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("w8a16", "w8a8")] + ["w4a16, gptq"]
)
def test_they_are_within_a_point(pocket: Pocket, dense: float, tmp_path: Path, name: str) -> None:
    if name == "w4a16, gptq":
        quant, given = QuantConfig("w4a16", method="gptq"), {"calib": pocket.calib, "calib_samples": 32}
        chosen = build(POCKET, tmp_path / "gptq", quant=quant, device="cpu", proof=False, **given)
        llm = LLM(chosen, "cpu")
    else:
        llm = LLM(POCKET, "cpu", quant=name)
    assert dense > 90
    assert abs(rouge_l(llm) - dense) < 1
