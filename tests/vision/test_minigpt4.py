"""MiniGPT-4 from official files: the encoder beside Hugging Face's BLIP-2 classes, and a LLaMA behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ingot import LLM, build
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.assembly import layer_of
from ingot.errors import CheckpointError, IngotError
from ingot.llm.prompt_inputs import Input, Prompt
from tests.vision.files import LLAMA2, SHAPES, TINY, Tiny, pixels, write_files

BEFORE, AFTER = [1, 17, 40, 9], [33, 8, 61]


@pytest.fixture(scope="module", params=[*SHAPES, "llama-2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, LLM, Any]:
    shape = LLAMA2 if request.param == "llama-2" else SHAPES[request.param]
    tiny = write_files(tmp_path_factory.mktemp("files"), shape)
    return tiny, LLM(tiny.file, "cpu"), shape


def test_outputs_are_those_of_hugging_face(case: tuple[Tiny, LLM, Any]) -> None:
    tiny, llm, shape = case
    given = pixels(shape, 2)
    expected = tiny.encode(given)
    found = llm.engine.model.encode(given).unflatten(0, (2, -1))
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_logits_of_text_around_a_picture(case: tuple[Tiny, LLM, Any]) -> None:
    tiny, llm, shape = case
    given = pixels(shape, 1)[0]
    expected = tiny.logits(BEFORE, given, AFTER)
    found = llm.logits(Prompt([BEFORE, Input(given), AFTER]))
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_files(tmp_path_factory.mktemp("files"))


def test_an_engine_is_the_files(tiny: Tiny, tmp_path: Path) -> None:
    folder = build(tiny.file, tmp_path / "engine", dtype="fp32", device="cpu", proof=False)
    given = pixels(TINY, 2)
    prompts = [Prompt([BEFORE, Input(one), AFTER]) for one in given]
    values: Any = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.0}
    found = LLM(folder, "cpu").generate([*prompts, Prompt([BEFORE])], **values)
    alone = LLM(tiny.file, "cpu")
    assert [one.token_ids for one in found[:2]] == [
        alone.generate([p], **values)[0].token_ids for p in prompts
    ]
    logits = [tiny.logits(BEFORE, one, AFTER)[-1].argmax() for one in given]
    assert [one.token_ids[0] for one in found[:2]] == [int(one) for one in logits]


def test_positions_of_another_size_are_interpolated(tiny: Tiny) -> None:
    named = yaml.safe_load(tiny.file.read_text()) | {"image_size": 42}
    larger = tiny.file.with_name("larger.yaml")
    larger.write_text(yaml.safe_dump(named))
    llm, given = LLM(larger, "cpu"), torch.randn(1, 3, 42, 42, generator=torch.Generator().manual_seed(1))
    seen = tiny.vit.encoder(tiny.vit.embeddings(given, interpolate_pos_encoding=True)).last_hidden_state
    found = llm.engine.model.get_submodule("encoder.vit")(given)
    assert float((found - seen[0]).detach().norm() / seen.detach().norm()) < 1e-5


def _without(part: str, name: str) -> Callable[[Tiny], None]:
    def change(tiny: Tiny) -> None:
        file = tiny.file.with_name(f"{part}.pth")
        state = torch.load(file, weights_only=True)
        (state if part == "vit" else state["model"]).pop(name)
        torch.save(state, file)

    return change


def _named(**values: Any) -> Callable[[Tiny], None]:
    def change(tiny: Tiny) -> None:
        found = yaml.safe_load(tiny.file.read_text()) | values
        tiny.file.write_text(yaml.safe_dump({k: v for k, v in found.items() if v is not None}))

    return change


def _with(part: str, name: str) -> Callable[[Tiny], None]:
    def change(tiny: Tiny) -> None:
        file = tiny.file.with_name(f"{part}.pth")
        state = torch.load(file, weights_only=True)
        (state if part == "vit" else state["model"])[name] = torch.ones(3)
        torch.save(state, file)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("vit", "blocks.1.attn.q_bias"),
            r"missing from the checkpoint.*vit\.blocks\.1\.attn\.q_bias",
        ),
        (_without("vit", "pos_embed"), "vit.pos_embed of MiniGPT-4's files gives a size"),
        (_without("qformer", "query_tokens"), "qformer.query_tokens"),
        (_without("projector", "llama_proj.bias"), r"missing.*projector\.llama_proj\.bias"),
        (_with("projector", "llama_proj2.weight"), r"unexpected.*projector\.llama_proj2\.weight"),
        (_with("qformer", "Qformer.bert.encoder.layer.0.gate"), "unexpected.*layer.0.gate"),
        (_named(vit_depth=9), r"fewer blocks than are to run.*seen: 3; allowed: 9"),
        (_named(image_size=30), "multiple of the patches' size"),
        (_named(vit="absent.pth"), "absent.pth"),
        (_named(llm="absent"), "absent"),
        (_named(model="minigpt-v2"), "model: minigpt4"),
        (_named(vit_head=4), "vit_head"),
        (_named(vit_heads="four"), "vit_heads"),
        (_named(vit_heads=0), "vit_heads"),
        (_named(projector=None), "projector"),
        (_named(vit_heads=5), "num_heads must divide"),
        (_named(qformer=None), "mis-shaped"),
        (_named(qformer=None, image_size=21), "4 patches are one position.*seen: 9 patches"),
    ],
)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[Tiny], None], message: str
) -> None:
    tiny = write_files(tmp_path)
    change(tiny)
    with pytest.raises(IngotError, match=f"(?s){message}"):
        LLM(tiny.file, "cpu")


def test_all_that_is_missing_is_listed_at_once(tmp_path: Path) -> None:
    tiny = write_files(tmp_path)
    _without("vit", "blocks.0.norm1.weight")(tiny)
    _without("projector", "llama_proj.bias")(tiny)
    _with("qformer", "stray")(tiny)
    with pytest.raises(CheckpointError) as caught:
        LLM(tiny.file, "cpu")
    named = ("vit.blocks.0.norm1.weight", "projector.llama_proj.bias", "qformer.stray")
    assert [name in str(caught.value) for name in named] == [True] * 3


def test_a_yaml_file_that_is_not_there() -> None:
    with pytest.raises(IngotError, match="no such file"):
        LLM("nowhere/minigpt4.yaml", "cpu")


def test_a_config_without_its_section(tmp_path: Path) -> None:
    named = {"architectures": ["MiniGPT4ForConditionalGeneration"], "model_type": "minigpt4", "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(named))
    with pytest.raises(IngotError, match="has no section minigpt4"):
        LLM.from_config(tmp_path, "cpu")


def test_the_llm_s_own_chat_format_is_not_the_model_s(tmp_path: Path) -> None:
    tiny = write_files(tmp_path)
    (tmp_path / "llama/generation_config.json").write_text(json.dumps({"chat_format": "chatml", "top_k": 3}))
    with open_checkpoint(tiny.file) as found:
        assert found.generation_config == {"chat_format": "minigpt4", "top_k": 3}


def test_layers_of_each_part_have_names() -> None:
    names = ["encoder.vit.layers.3.mlp.up_proj", "encoder.layers.1.norm", "layers.0.mlp", "encoder.projector"]
    assert [layer_of(name) for name in names] == [
        "encoder.vit.layers.3",
        "encoder.layers.1",
        "layers.0",
        "encoder.projector",
    ]
