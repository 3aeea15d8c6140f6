"""MiniGPT-4 beside what the original implementation computed of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ingot import LLM, build
from ingot.llm.prompt_inputs import Input, Prompt

GREEDY: Any = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0}


def engine(golden: Path, folder: Path, side: int) -> LLM:
    weight = golden / "minigpt4/weight"
    files = {"llm": "llama", "vit": "eva_vit_g.pth", "qformer": "blip2_pretrained_flant5xxl.pth"}
    named: dict[str, Any] = {name: str(weight / file) for name, file in files.items()}
    named |= {"projector": str(weight / "pretrained_minigpt4.pth"), "model": "minigpt4", "image_size": side}
    named |= {"vit_depth": 3, "vit_heads": 4, "qformer_heads": 4}
    file = folder / "minigpt4.yaml"
    file.write_text(yaml.safe_dump(named))
    return LLM(build(file, folder / "engine", dtype="fp32", device="cpu", proof=False), "cpu")


@pytest.fixture(scope="module")
def llm(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return engine(golden, tmp_path_factory.mktemp("golden"), 56)


def arrays(golden: Path, name: str) -> dict[str, torch.Tensor]:
    with np.load(golden / f"minigpt4/{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def furthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def test_each_stage(llm: LLM, golden: Path) -> None:
    expected, encoder = arrays(golden, "vision"), llm.engine.model.encoder
    assert encoder is not None
    stages: dict[str, torch.Tensor] = {}
    names = {"vit": "vit_out", "ln_vision": "ln_vision_out", "qformer": "qformer_query_out"}

    def keep(module: torch.nn.Module, _: Any, output: Any) -> None:
        stages[keys[module]] = output if isinstance(output, torch.Tensor) else output[0]

    keys = {encoder.get_submodule(name): key for name, key in names.items()}
    for module in keys:
        module.register_forward_hook(keep)
    stages["image_embeds"] = llm.engine.model.encode(expected["pixel_values"])
    for name, found in stages.items():
        assert furthest(found, expected[name].flatten(0, 1)) < 1e-4, name
    assert len(stages) == 4


def test_positions_are_interpolated(golden: Path, tmp_path: Path) -> None:
    expected, model = arrays(golden, "vision_interp"), engine(golden, tmp_path, 84).engine.model
    table = model.get_parameter("encoder.vit.embed_positions.weight")
    assert torch.equal(table, expected["pos_embed_used"][0])
    assert furthest(model.encode(expected["pixel_values"]), expected["image_embeds"][0]) < 1e-4


@pytest.mark.parametrize("number", [0, 1])
def test_both_rounds_about_a_picture(llm: LLM, golden: Path, number: int) -> None:
    expected, picture = arrays(golden, "conversation"), arrays(golden, "vision")["pixel_values"][0]
    before, after = (expected[f"r{number}_{part}_ids"].tolist() for part in ("before", "after"))
    prompt = Prompt([before, Input(picture), after])
    assert llm.generate([prompt], **GREEDY)[0].token_ids == expected[f"r{number}_greedy_ids"].tolist()


@pytest.mark.parametrize("number", [0, 1])
def test_the_demonstration_s_repetition_penalty(llm: LLM, golden: Path, number: int) -> None:
    """It sees BOS and the answer alone, since the original's prompt is embeddings."""
    expected, picture = arrays(golden, "conversation"), arrays(golden, "vision")["pixel_values"][0]
    before, after = (expected[f"r{number}_{part}_ids"].tolist() for part in ("before", "after"))
    found = llm.generate([Prompt([before, Input(picture), after])], **GREEDY, repetition_penalty=1.05)
    assert found[0].token_ids == expected[f"r{number}_greedy_reppen1.05_ids"].tolist()


def test_logits(golden: Path, tmp_path: Path) -> None:
    """The original's rotary table was made in fp16, since it loads the LLM so, and widened afterwards; with
    the same table the logits agree, and with an exact one to what its rounding makes of them.
    """
    llm, expected = engine(golden, tmp_path, 56), arrays(golden, "conversation")
    picture = Input(arrays(golden, "vision")["pixel_values"][0])
    prompt = Prompt([expected["r0_before_ids"].tolist(), picture, expected["r0_after_ids"].tolist()])
    exact = llm.logits(prompt)
    rotary = llm.engine.model.rotary
    assert rotary is not None
    rotary.table.copy_(rotary.table.half().float())
    fresh = LLM.of_engine(llm.engine)
    assert furthest(fresh.logits(prompt), expected["r0_logits"]) < 1e-4
    assert furthest(exact, expected["r0_logits"]) < 1e-2


def test_two_pictures_in_a_batch_beside_text(llm: LLM, golden: Path) -> None:
    expected, pictures = arrays(golden, "batch"), arrays(golden, "vision")["pixel_values"]
    rows = [[expected[f"row{n}_{part}_ids"].tolist() for part in ("before", "after")] for n in range(2)]
    prompts = [Prompt([rows[n][0], Input(pictures[n]), rows[n][1]]) for n in range(2)]
    found = llm.generate([prompts[0], Prompt([[1, 5, 9, 30]]), prompts[1]], **GREEDY)
    greedy = [row.tolist() for row in expected["batch_greedy_ids"]]
    assert [found[0].token_ids, found[2].token_ids] == greedy
