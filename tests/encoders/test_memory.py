"""The ledger counts what a model with an encoder allocates; the manifest and the registry name its kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from ingot.building.ledger_source import read_setting
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import ConfigError
from ingot.memory.ledger import MemorySetting, ledger
from ingot.memory.memory_sizes import encoding_bytes, weight_bytes
from ingot.memory.step_memory import step_buffer_bytes
from ingot.models.model_registry import ARCHITECTURES, register
from ingot.models.whisper import WHISPER
from ingot.runtime.step.step_buffer import StepBuffer
from tests.e2e.terminal import ingot
from tests.encoders.conftest import Side
from tests.encoders.pictures import PICTURES
from tests.support.shown_errors import raises_shown
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("name", ["pictures", "speech"])
def test_the_ledger_counts_the_encoder_to_the_byte(name: str, request: pytest.FixtureRequest) -> None:
    side: Side = request.getfixturevalue(name)
    llm = side.open()
    setting = read_setting(
        str(side.folder), device="cpu", max_batch_size=8, runtime=RuntimeConfig(block_size=16)
    )
    bill = {(item.kind, item.name): item.bytes for item in ledger(setting).items}
    encoding = llm.executor.runner.encoding
    assert encoding is not None
    seconds = [cache.encoded for cache in llm.executor.runner.caches if cache.encoded is not None]
    held = encoding._rows.nbytes + sum(second.nbytes for second in seconds)
    assert bill["encoders", "encoder cache"] == held > 0
    encoder = llm.engine.model.encoder
    assert encoder is not None
    assert bill["weights", "encoder"] == sum(weight.nbytes for weight in encoder.parameters())
    weights = weight_bytes(setting.model, setting.quant, torch.float32)
    assert sum(weights.values()) == sum(weight.nbytes for weight in llm.engine.model.parameters())


def test_a_text_model_has_no_encoder_in_its_ledger(speech: Side) -> None:
    model = read_setting(str(speech.folder)).model.replace(wiring="none", encoder=None, architecture="gpt2")
    found = ledger(MemorySetting(model, "fp16", 8, 96))
    assert found.of("encoders") == 0
    assert all(item.name != "encoder" for item in found.items)


def test_the_encoder_cache_has_the_asked_size(speech: Side, pictures: Side) -> None:
    for side, default in ((speech, 8 * 3), (pictures, 2 * 12288 // 16)):
        model = read_setting(str(side.folder)).model
        runtime = RuntimeConfig(block_size=16)
        assert MemorySetting(model, "fp16", 8, 96, runtime=runtime).encoder_blocks == default
        asked = runtime.replace(encoder_positions=33)
        assert MemorySetting(model, "fp16", 8, 96, runtime=asked).encoder_blocks == 3


def test_a_step_buffer_has_room_for_encoded_positions() -> None:
    buffer = StepBuffer(40, 3, 7, 5, torch.device("cpu"), 2, encoded_positions=70, block_size=16)
    assert step_buffer_bytes(40, 3, 7, 5, 2, encoded_width=5) == buffer._device.nbytes + 4 * 3 * 2
    batch = buffer.padded_batch(1, 96)
    assert batch.encoded is not None
    assert batch.encoded.block_tables.shape == (3, 5)


def test_an_older_manifest_is_one_of_text(speech: Side) -> None:
    config = read_setting(str(speech.folder)).model.replace(wiring="none", encoder=None, architecture="gpt2")
    data = json.loads(json.dumps(config.to_json()))
    assert (data.pop("wiring"), data.pop("encoder")) == ("none", None)
    assert DecoderConfig.from_json(data) == config


def test_a_config_says_what_does_not_fit(speech: Side, pictures: Side) -> None:
    transcribed, seen = (read_setting(str(side.folder)).model for side in (speech, pictures))
    assert seen.encoder is not None
    odd = {
        "unknown wiring": lambda: transcribed.replace(wiring="audio"),
        "unknown modality": lambda: EncoderConfig(8, 4, (3,), 8, "text"),
        "unless its wiring is none": lambda: transcribed.replace(wiring="none"),
        "has an encoder": lambda: seen.replace(encoder=None),
        "decoder's hidden_size": lambda: seen.replace(encoder=seen.encoder.replace(hidden_size=8)),
        "outside the vocabulary": lambda: seen.replace(encoder=seen.encoder.replace(placeholder_id=97)),
        "max_positions": lambda: EncoderConfig(8, 0, (3,), 8, "speech"),
        "must be positive": lambda: EncoderConfig(8, 4, (3,), 0, "speech"),
        "shape of an input": lambda: EncoderConfig(8, 4, (), 8, "speech"),
    }
    for message, make in odd.items():
        with raises_shown(ConfigError, message):
            make()


def test_names_are_registered_once() -> None:
    before = list(ARCHITECTURES)
    register(WHISPER)
    assert before == ARCHITECTURES
    for other in (
        dataclasses.replace(PICTURES, name="whisper"),
        dataclasses.replace(WHISPER, keys=frozenset()),
    ):
        with pytest.raises(ConfigError, match="two architectures of one name"):
            register(other)
    assert before == ARCHITECTURES


def test_plan_shows_the_encoder_cache_of_a_model_that_has_one(speech: Side) -> None:
    shown = ingot("plan", speech.folder, "--gpu", "24GiB", "--max-batch-size", "4")
    assert shown.exit_code == 0
    assert "encoder cache" in shown.output
    assert "keys and values of 256 positions" in shown.output
    assert "w4a8" in shown.output  # not rotated
    assert "rptq-w8a8" in shown.output  # recordings calibrate it


def test_plan_shows_schemes_that_do_not_rotate_a_model_with_layer_norm(tmp_path: Path) -> None:
    tiny_config("gpt2", architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    shown = ingot("plan", tmp_path / "config.json", "--gpu", "24GiB")
    assert shown.exit_code == 0, shown.output
    assert "w4a8" in shown.output


def test_bytes_of_encoding_and_of_spliced_rows(pictures: Side) -> None:
    config, runtime = read_setting(str(pictures.folder)).model, RuntimeConfig(token_budget=160)
    assert config.encoder is not None
    encoded = 25 * config.encoder.activation_values
    spliced = 2 * (160 + 10) * config.hidden_size  # rows of the table, and what is put together
    found = encoding_bytes(config, HalfDtypes.of("fp32"), runtime, 8, on_gpu=False)
    assert found == 4 * (encoded + spliced)
    two = encoding_bytes(config, HalfDtypes("fp16", "fp32"), runtime, 8, on_gpu=False)
    assert two == 4 * encoded + 2 * (spliced + 25 * config.encoder.hidden_size)  # outputs in both dtypes
