"""The shipped picture model on a GPU: answers of a CPU, alone and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM
from recipes.vision.draw import draw
from recipes.vision.evaluate import held_out_items, messages_of
from recipes.vision.scenes import held_out_scene

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"
GREEDY: Any = {"max_new_tokens": 48, "temperature": 0.0}
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [("fp16", "none"), ("bf16", "none"), ("fp32", "none"), ("fp16", "w8a16"), ("fp16", "w8a8")],
)
def test_unseen_scenes(dtype: str, quant: str) -> None:
    items = held_out_items(range(3, 51))
    pictures = draw([held_out_scene(item.scene) for item in items])
    talks = [messages_of(item, picture) for item, picture in zip(items, pictures, strict=True)]
    with LLM(POCKET, "cuda", compute_dtype=dtype, quant=quant) as llm:
        together = [str(output.text).strip() for output in llm.chat(talks, **GREEDY)]
        alone = [str(llm.chat(talk, **GREEDY).text).strip() for talk in talks[:6]]
    right = [item.rounds[-1].answer for item in items]
    assert sum(a == b for a, b in zip(together, right, strict=True)) >= len(items) - (
        2 if quant != "none" else 1
    )
    assert alone == together[:6]


def test_rows_are_those_of_a_cpu() -> None:
    picture = draw([held_out_scene(1)])[0]
    rows = [LLM(POCKET, device, compute_dtype="fp32").encode_image(picture) for device in ("cpu", "cuda")]
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-5
    narrow = LLM(POCKET, "cuda", compute_dtype="fp16").encode_image(picture)
    assert float((rows[0] - narrow).norm() / rows[0].norm()) < 5e-3
    assert torch.isfinite(narrow).all()
