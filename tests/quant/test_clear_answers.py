"""Answers that no rounding changes: a CPU in fp16 gives them, and another model does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import LLM
from ingot.config.quantization.quant_config import QuantConfig
from tests.quant.clear_answers import ClearAnswers
from tests.tiny_models import save_model, tiny_config

QUANT = QuantConfig("w4a16", 32, head="w8a16", layers={"layers.0.mlp.*": "w8a16", "*.o_proj": "none"})
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.stays("fp16")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_cpu_in_16_bits_gives_them(dtype: str, tmp_path: Path) -> None:
    save_model(tiny_config("qwen2", **SIZES), tmp_path, seed=3)
    error, mean = {"fp16": (0.02, 0.006), "bf16": (0.15, 0.06)}[dtype]
    clear = ClearAnswers(tmp_path, QUANT, dtype, error)
    answers = clear.answers(9)
    assert [len(answer.prompt) for answer in answers] == [1, 2, 3, 4, 5, 6, 7, 1, 2]
    clear.check(LLM(tmp_path, "cpu", quant=QUANT, compute_dtype=dtype), answers, mean)
    assert clear.answers(4) == answers[:4]
    with pytest.raises(AssertionError):
        clear.check(LLM(tmp_path, "cpu", compute_dtype=dtype), answers, mean)
