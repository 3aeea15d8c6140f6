"""``ingot doctor`` on a model of pictures: what layers of each part cost, and what it measures them on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ingot import LLM
from ingot.building.calibration.calibrate import dense_model
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.engine.assembly import Assembly
from ingot.engine.engine_text import read_text_parts
from ingot.errors import ConfigError
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.doctor import needs_of
from ingot.measure.evaluate.doctor.doctor_samples import captioned_texts
from ingot.measure.evaluate.doctor.precision_options import options_of
from ingot.measure.evaluate.doctor.precision_probe import PrecisionProbe, Text
from ingot.measure.evaluate.doctor.scheme_patterns import layer_index, layer_of, mixed, operator
from ingot.measure.evaluate.token_divergence import kl_rows
from tests.e2e.terminal import ingot
from tests.vision.conftest import POCKET
from tests.vision.files import TINY, Tiny, pixels, write_files

CPU = torch.device("cpu")
USUAL = ("--quant", "w8a16", "--budget", "kl_mean=1", "--device", "cpu")
BEFORE, AFTER = [1, 7, 9], [11, 13, 15, 17]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_files(tmp_path_factory.mktemp("tiny"), TINY)


def _logits(tiny: Tiny, picture: torch.Tensor, quant: QuantConfig | None) -> torch.Tensor:
    """Of the tokens behind a picture, by the runtime."""
    chosen = {} if quant is None else {"quant": quant}
    with LLM(tiny.file, "cpu", max_batch_size=1, compute_dtype="fp32", **chosen) as llm:
        return llm.logits(Prompt([BEFORE, Input(picture), AFTER]))[-len(AFTER) :]


@pytest.mark.parametrize(
    "name",
    [
        "encoder.vit.layers.1.mlp.down_proj",
        "encoder.qformer.layers.0.encoder_attn.kv_proj",
        "encoder.projector",
        "layers.0.self_attn.o_proj",
    ],
)
def test_a_layer_alone_costs_what_a_model_with_it_costs(name: str, tiny: Tiny) -> None:
    (picture,) = pixels(TINY, 1)
    ids = (*BEFORE, *([0] * TINY.queries), *AFTER)
    texts = [Text(ids, range(len(ids) - len(AFTER), len(ids)), picture), Text((1, 7, 9), range(1, 2))]
    with open_checkpoint(tiny.file) as source:
        assembly = Assembly.of(source, BuildConfig(dtype="fp32", max_seq_len=64), QuantConfig())
        load = lambda path: assembly.load(path, checkpoint=source)  # noqa: E731
        options = {one.name: one for one in options_of(assembly, QuantConfig("w8a16"), ("w8a16",))}
        with torch.inference_mode():
            probe = PrecisionProbe(dense_model(assembly), load, texts, CPU, torch.float32)
            alone = probe.alone([options[name]], ["w8a16"])[name]["w8a16"]
            assert probe.num_tokens == len(AFTER) + 1
            assert probe.together({name: options[name].schemes["w8a16"]}) == pytest.approx(alone, rel=1e-6)
    exact, changed = (
        _logits(tiny, picture, quant).double().log_softmax(-1)
        for quant in (None, QuantConfig("none", layers={name: "w8a16"}))
    )
    expected = float(kl_rows(exact, changed).sum())
    text_alone = alone * probe.num_tokens - expected
    assert expected > 1e-9
    if name.startswith("encoder."):  # the text has no picture, which nothing of the encoder can change
        assert text_alone == pytest.approx(0, abs=0.03 * expected)
    else:
        assert text_alone > 0


def _file(folder: Path, *records: Mapping[str, object]) -> Path:
    path = folder / "captions.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_a_caption_is_what_counts(scene: Path, tmp_path: Path) -> None:
    data = _file(tmp_path, {"image": str(scene), "captions": ["A red circle.", "no"]})
    with open_checkpoint(POCKET) as source:
        assembly = Assembly.of(source, BuildConfig(dtype="fp32", max_seq_len=64), QuantConfig())
        config, text = assembly.model_config, read_text_parts(source)
    items = read_data(data, needs=needs_of(str(POCKET), data))
    (one,) = captioned_texts(items, text, config, None, 2048)
    assert text.tokenizer is not None
    assert one.features is not None
    assert one.ids.count(0) == config.placeholders
    assert text.tokenizer.decode(list(one.ids[one.counted.start + 1 :])) == "A red circle."
    prompt = text.tokenizer.decode(list(one.ids[: one.counted.start + 1]))
    assert prompt.rstrip().endswith("Describe this image.###Assistant:")
    assert one.counted.stop == len(one.ids)
    (cut,) = captioned_texts(items, text, config, 2, 2048)
    assert len(cut.ids) == one.counted.start + 3
    with pytest.raises(ConfigError, match="item 1 is longer than the model's context"):
        captioned_texts(items, text, config, None, len(one.ids) - 1)
    assert captioned_texts(items, text, config, None, len(one.ids))


@pytest.mark.parametrize(
    ("record", "words", "why"),
    [
        ({"text": "Only words."}, (), "no picture"),
        ({"image": "SCENE"}, (), "a picture without a caption"),
        ({"image": "absent.png", "text": "a"}, (), "there is no such picture"),
        ({"image": "SCENE", "text": "a"}, ("--window", 64), "a caption is read whole"),
    ],
)
def test_data_that_does_not_serve(
    record: dict[str, str], words: tuple[object, ...], why: str, scene: Path, tmp_path: Path
) -> None:
    given = {name: str(scene) if value == "SCENE" else value for name, value in record.items()}
    out = tmp_path / "mixed.yaml"
    shown = ingot("doctor", POCKET, "--data", _file(tmp_path, given), *USUAL, *words, "--out", out)
    assert shown.exit_code == 2, shown.output
    assert why in " ".join(shown.stderr.split())
    assert not out.exists()


def test_the_verb_measures_every_part(scene: Path, tmp_path: Path) -> None:
    """A folder in cc_sbu_align's layout; every layer of every part is measured."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image/7.png").write_bytes(scene.read_bytes())
    listed = {"annotations": [{"image_id": "7", "caption": "An orange square."}]}
    (tmp_path / "filter_cap.json").write_text(json.dumps(listed))
    out, report = tmp_path / "mixed.yaml", tmp_path / "report.json"
    words = ("--data", tmp_path, *USUAL, "--up-to", "w8a16", "--out", out, "--json-file", report)
    shown = ingot("doctor", POCKET, *words)
    assert shown.exit_code == 0, shown.output
    record = json.loads(report.read_text())
    stacks = {f"encoder.{part}.layers.{i}" for part in ("vit", "qformer") for i in range(4)}
    assert set(record["encoder_layers"]) == {*stacks, "encoder.projector"}
    assert all(layer["kl"]["w8a16"] > 0 for layer in record["layers"])
    assert {read_quant(str(out)).at(layer["name"]).scheme for layer in record["layers"]} == {"w8a16"}


def test_parts_are_named_in_patterns() -> None:
    parts = ("self_attn.qkv_proj", "mlp.up_proj", "mlp.down_proj")
    stacks = ("encoder.vit.", "encoder.qformer.", "")
    names = [f"{stack}layers.{i}.{part}" for stack in stacks for i in range(4) for part in parts]
    schemes = {name: "w8a16" if name.startswith("encoder.vit.") else "w4a16" for name in names}
    found = mixed({**schemes, "encoder.projector": "w8a16"}, QuantConfig("w4a16"))
    assert (found.scheme, found.layers) == (
        "w4a16",
        {"encoder.vit.layers.*": "w8a16", "encoder.projector": "w8a16"},
    )
    name = "encoder.qformer.layers.2.encoder_attn.q_proj"
    assert (layer_of(name), layer_index(name)) == ("encoder.qformer.layers.2", 2)
    assert operator(name) == "encoder.qformer.encoder_attn.q_proj"
    assert (layer_of("encoder.projector"), layer_index("encoder.projector")) == ("encoder.projector", None)
    assert operator("encoder.projector") == "encoder.projector"
