"""Calibration reads pictures: which records it takes, and what each layer of both halves sees of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ingot import LLM, build
from ingot.building.calibration.calibrate import Walk, dense_model
from ingot.building.calibration.picture_samples import read_pictures
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.engine.assembly import Assembly
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.engine.manifest import Manifest
from ingot.errors import BuildError, ConfigError
from ingot.layers.linear import linears
from ingot.proof.verify_engine import verify
from ingot.quant.methods.activation_statistics import InputStatistics
from ingot.text.chat.chat_pictures import ALIGNMENT
from ingot.text.prompt import Input, Prompt
from tests.vision.files import TINY, pixels, write_files

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"
CPU = torch.device("cpu")
_GPTQ = QuantConfig("w4a16", method="gptq")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, TextParts]:
    with open_checkpoint(POCKET) as source:
        build = BuildConfig(dtype="fp32", max_seq_len=128)
        return Assembly.of(source, build, QuantConfig()).model_config, read_text_parts(source)


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A folder with three pictures of one colour each."""
    (tmp_path / "image").mkdir()
    for name, colour in (("1", "red"), ("2", "lime"), ("3", "blue")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"image/{name}.png")
    return tmp_path


def _file(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def _channels(features: torch.Tensor | None) -> list[float]:
    assert features is not None
    return [round(float(channel.mean()), 3) for channel in features]


RED, LIME = [1.93, -1.752, -1.48], [-1.792, 2.075, -1.48]


def test_a_caption_is_the_answer_to_what_the_original_asks(shown: Path, parts: tuple[Any, TextParts]) -> None:
    data = read_pictures(_file(shown, {"image": "image/2.png", "text": "It is lime."}), 8, 128, *parts)
    config, text = parts
    assert text.tokenizer is not None
    (ids,) = data.samples
    first = ids.index(config.encoder.placeholder_id)
    outputs = config.encoder.max_positions
    assert ids[first : first + outputs] == (config.encoder.placeholder_id,) * outputs
    words = text.tokenizer.decode([i for i in ids if i != config.encoder.placeholder_id])
    assert ALIGNMENT[0] in words
    assert words.rstrip("#").endswith("It is lime.")
    assert _channels(data.features[0]) == LIME


def test_questions_are_drawn_by_a_seed(shown: Path, parts: tuple[Any, TextParts]) -> None:
    """In the frame of the original's training: no system's message, and the caption ends with ###."""
    own = {"image": "image/1.png", "prompt": "What?", "answer": "Red."}
    records = [{"image": f"image/{1 + n % 3}.png", "text": f"It is {n}."} for n in range(24)]
    file = _file(shown, *records, own, {"text": "Only words."})
    assert parts[1].tokenizer is not None
    decode, placeholder = parts[1].tokenizer.decode, parts[0].encoder.placeholder_id
    drawn = {seed: read_pictures(file, 99, 256, *parts, seed) for seed in (7, 8, 7)}
    fixed = read_pictures(file, 99, 256, *parts)
    assert len({one.sha256 for one in (*drawn.values(), fixed)}) == 3
    assert drawn[7].samples == read_pictures(file, 99, 256, *parts, 7).samples != drawn[8].samples
    texts = [decode([i for i in ids if i != placeholder]) for ids in drawn[7].samples[:24]]
    asked = [next(question for question in ALIGNMENT if question in text) for text in texts]
    assert set(asked) == set(ALIGNMENT)
    for n, (text, question) in enumerate(zip(texts, asked, strict=True)):
        squeezed = "".join(text.split())
        wanted = f"###Human: <Img></Img> {question} ###Assistant: It is {n}.###"
        assert squeezed == "".join(wanted.split())
    assert drawn[7].samples[24:] == fixed.samples[24:]
    assert all(ids[0] == parts[1].tokenizer.bos_id for ids in drawn[7].samples)


def test_a_seed_is_of_pictures(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("Only words. " * 99)
    pocket = POCKET.parents[1] / "pocket-chat"
    with pytest.raises(ConfigError, match="only questions about pictures are drawn"):
        build(pocket, tmp_path / "e", quant=_GPTQ, calib=file, calib_prompt_seed=1, device="cpu")
    with pytest.raises(ConfigError, match=r"uses no calibration data; seen: calib_prompt_seed=0"):
        build(POCKET, tmp_path / "e", calib_prompt_seed=0, device="cpu")


def test_text_alone_has_no_picture(shown: Path, parts: tuple[Any, TextParts]) -> None:
    file = _file(shown, {"text": "Only words."}, {"image": "image/1.png", "token_ids": [1, 5, 6]})
    data = read_pictures(file, 8, 128, *parts)
    assert data.features[0] is None
    assert _channels(data.features[1]) == RED
    placeholder = parts[0].encoder.placeholder_id
    assert data.samples[1] == (1, *([placeholder] * parts[0].encoder.max_positions), 5, 6)


def test_the_originals_folder_and_a_folder_of_pictures(shown: Path, parts: tuple[Any, TextParts]) -> None:
    plain = read_pictures(shown / "image", 2, 128, *parts)
    assert plain.records == 3
    assert [_channels(one)[0] for one in plain.features] == [RED[0], LIME[0]]
    listed = {"annotations": [{"image_id": "2", "caption": "lime"}, {"image_id": "1", "caption": "red"}]}
    (shown / "filter_cap.json").write_text(json.dumps(listed))
    captioned = read_pictures(shown, 8, 128, *parts)
    assert [_channels(one)[0] for one in captioned.features] == [LIME[0], RED[0]]
    assert len(captioned.samples[0]) > len(plain.samples[0])
    assert captioned.sha256 != plain.sha256


def test_the_hash_is_of_the_pictures_too(shown: Path, parts: tuple[Any, TextParts]) -> None:
    file = _file(shown, {"image": "image/1.png"})
    before = read_pictures(file, 8, 128, *parts).sha256
    Image.new("RGB", (40, 30), "white").save(shown / "image/1.png")
    assert read_pictures(file, 8, 128, *parts).sha256 != before


def test_a_long_record_is_cut_behind_its_picture(shown: Path, parts: tuple[Any, TextParts]) -> None:
    data = read_pictures(_file(shown, {"image": "image/1.png", "text": "words " * 200}), 8, 100, *parts)
    assert len(data.samples[0]) == 100


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"image": "image/9.png"}, "no such picture"),
        ({"image": "image/1.png", "token_ids": [1, 0]}, "token 0 stands for pictures"),
        ({"image": 7}, "a text is missing"),
        (
            {"image": "image/1.png", "messages": [{"role": "assistant", "content": "x"}]},
            "no message of a user",
        ),
        ({"nothing": 1}, "none of the known fields"),
        ({"token_ids": []}, "no tokens"),
    ],
)
def test_a_record_that_is_no_sample(
    record: dict[str, Any], what: str, shown: Path, parts: tuple[Any, TextParts]
) -> None:
    with pytest.raises(ConfigError, match="cannot be used as samples") as error:
        read_pictures(_file(shown, record), 8, 128, *parts)
    assert what in str(error.value)


def test_a_picture_needs_its_room(shown: Path, parts: tuple[Any, TextParts]) -> None:
    with pytest.raises(ConfigError, match="does not fit in 10 tokens"):
        read_pictures(_file(shown, {"image": "image/1.png"}), 8, 10, *parts)


@pytest.mark.parametrize(
    "listed", ['{"annotations": 3}', '{"images": []}', "[", '{"annotations": [{"image_id": 1}]}']
)
def test_a_list_of_captions_that_is_none(listed: str, shown: Path, parts: tuple[Any, TextParts]) -> None:
    (shown / "filter_cap.json").write_text(listed)
    with pytest.raises(ConfigError, match=r"holds no captions.*calib"):
        read_pictures(shown, 8, 128, *parts)


SAMPLES = ([1, *[0] * 5, 17, 40], [5, 6, 7, 8, 9], [1, 3, *[0] * 5, 33])


@pytest.mark.parametrize("propagate", [False, True])
def test_every_layer_sees_what_it_is_given_when_requests_run(tmp_path: Path, propagate: bool) -> None:
    """Two pictures with text around them, and text alone; the module's own inputs are caught by hooks."""
    tiny, given = write_files(tmp_path), pixels(TINY, 2)
    llm = LLM(tiny.file, "cpu", compute_dtype="fp32")
    wanted = _inputs_by_hooks(llm, given)
    with open_checkpoint(tiny.file) as source:
        assembly = Assembly.of(source, BuildConfig(dtype="fp32", max_seq_len=64), QuantConfig())
        statistic: Callable[[str, int], Any] = lambda name, size: InputStatistics.of(size, CPU)  # noqa: E731
        load = partial(assembly.load, checkpoint=source, device=CPU)
        features = [given[0], None, given[1]]
        model = dense_model(assembly)
        walk = Walk(model, load, SAMPLES, CPU, statistic, features=features, propagate=propagate)
        seen: dict[str, torch.Tensor] = {}
        for name in walk.layers:
            layer = walk.observe(name)
            seen |= {one: found.ranges.absmax() for one, found in layer.inputs.items()}
            walk.advance(layer)
    assert walk.layers[:3] == ["encoder.vit.layers.0", "encoder.vit.layers.1", "encoder.qformer.layers.0"]
    assert walk.layers[5:7] == ["encoder.projector", "layers.0"]
    assert {*seen} == {*linears(model)} - {"lm_head"}
    for name, found in seen.items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def _inputs_by_hooks(llm: LLM, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The largest value of each channel of each linear layer's input, while the same prompts run."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, module in linears(llm.engine.model).items():
        module.register_forward_pre_hook(
            lambda _, x, name=name: found[name].append(x[0].flatten(0, -2).abs())
        )
    prompts = [
        Prompt([[1], Input(given[0]), [17, 40]]),
        Prompt([[5, 6, 7, 8, 9]]),
        Prompt([[1, 3], Input(given[1]), [33]]),
    ]
    with llm.tap("norm"):  # module by module
        llm.generate(prompts, max_new_tokens=1, ignore_eos=True, temperature=0.0)
    return {name: torch.cat(rows).amax(0) for name, rows in found.items()}


@pytest.mark.stays("options4")
@pytest.mark.parametrize(
    "options",
    [
        {"quant": "rptq-w8a8"},
        {"quant": "rptq-w4a8", "group": 32},
        {"quant": "w4a16", "method": "gptq"},
        {"quant": "w4a16", "method": "awq"},
        {"quant": "w8a8", "method": "smoothquant", "activations": "static"},
        {"quant": "vit=w8a8,qformer=w8a16,llm=rptq-w4a8"},
    ],
)
def test_schemes_that_calibrate_are_built_and_proven(
    options: dict[str, Any], shown: Path, tmp_path: Path
) -> None:
    captions = {"annotations": [{"image_id": str(n), "caption": "A scene of one colour."} for n in (1, 2, 3)]}
    (shown / "filter_cap.json").write_text(json.dumps(captions))
    engine = tmp_path / "engine"
    quant = read_quant(
        options["quant"], **{name: value for name, value in options.items() if name != "quant"}
    )
    build(POCKET, engine, device="cpu", quant=quant, calib=shown)
    found = verify(engine, "cpu", note=False, source=POCKET)
    assert found.verdict == "proven", found.failures
    assert not found.notes or "tie within the noise" in found.notes[0]


def test_parts_have_schemes_of_their_own() -> None:
    quant = read_quant("vit=w8a8, projector=w4a16, llm=w8a16")
    names = ("encoder.vit.layers.1.mlp.up_proj", "encoder.projector", "layers.0.mlp.down_proj")
    assert [quant.at(name).scheme for name in names] == ["w8a8", "w4a16", "w8a16"]
    assert quant.at("encoder.qformer.layers.0.self_attn.o_proj").scheme == "none"
    both = read_quant("encoder=w8a16,qformer=none")
    assert [both.at(f"encoder.{part}.layers.0.mlp.up_proj").scheme for part in ("vit", "qformer")] == [
        "w8a16",
        "none",
    ]
    for wrong in ("vit=w8a8,vit=none", "llm=w8a8,decoder=none", "eyes=w8a8", "vit=w3", "vit"):
        with pytest.raises(ConfigError):
            read_quant(wrong)


def test_values_of_pictures_matter(shown: Path, tmp_path: Path) -> None:
    """Static scales follow from what is shown."""
    found = []
    for name in ("1", "3"):
        engine = tmp_path / f"engine-{name}"
        quant = QuantConfig("w8a8", activations="static")
        build(POCKET, engine, device="cpu", quant=quant, calib=shown / f"image/{name}.png", proof=False)
        linear = LLM(engine, "cpu").engine.model.get_submodule("encoder.vit.layers.0.mlp.down_proj")
        found.append(float(linear.get_parameter("input_scale")))
    assert np.isfinite(found).all()
    assert found[0] != found[1]


def test_ranges_of_pictures_and_texts_are_apart(shown: Path, tmp_path: Path) -> None:
    engine, quant = tmp_path / "engine", read_quant("llm=rptq-w8a8")
    build(POCKET, engine, device="cpu", quant=quant, calib=shown / "image", proof=False)
    entry = Manifest.read(engine).calibration
    assert entry is not None
    assert list(entry.ranges) == ["R1", "R3", "R4", "R5"]
    assert all(own.tokens != own.spliced for own in entry.ranges.values())


def test_ready_rows_calibrate_the_llm(tmp_path: Path) -> None:
    """Whole prompts, padded to one length; no picture is read, so the encoder cannot be calibrated."""
    rows = np.random.default_rng(1).normal(0, 0.05, (4, 60, 256)).astype(np.float32)
    whole, padded = tmp_path / "whole.npy", tmp_path / "padded.npy"
    np.save(whole, rows)
    np.save(padded, np.pad(rows, ((0, 0), (3, 5), (0, 0))))
    quant = read_quant("vit=w8a8,llm=rptq-w4a8")
    found = [tmp_path / path.stem for path in (whole, padded)]
    for folder, path in zip(found, (whole, padded), strict=True):
        build(POCKET, folder, device="cpu", quant=quant, calib=path, proof=False)
    first, second = ((folder / "weights.safetensors").read_bytes() for folder in found)
    assert first == second
    with pytest.raises(BuildError, match="encoder"):
        build(POCKET, tmp_path / "e", device="cpu", quant="rptq-w8a8", calib=whole, proof=False)


def test_a_build_without_pictures_asks_for_pictures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs calibration data[\s\S]*pictures with captions"):
        build(POCKET, tmp_path / "out", device="cpu", quant=read_quant("rptq-w4a8"))
