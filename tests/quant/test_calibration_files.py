"""Samples from files, and ranges kept beside an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.building.calibration.calibration_cache import (
    cache_path,
    calibration_key,
    read_ranges,
    write_ranges,
)
from ingot.building.calibration.calibration_data import read_calibration_data
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.errors import ConfigError
from ingot.quant.methods.activation_statistics import ChannelRange
from tests.e2e.tiny import write_tiny
from tests.quant.inputs import inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def text(folder: Path) -> TextParts:
    """Qwen v1's text side with a vocabulary of single bytes."""
    return read_text_parts(open_checkpoint(folder))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records) + "\n\n")
    return path


def test_every_shape_becomes_the_prompt_that_the_model_sees(tmp_path: Path, text: TextParts) -> None:
    assert text.tokenizer is not None
    assert text.chat is not None
    asked = [{"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Yes"}]
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "plain"},
        {"messages": asked},
        {"messages": answered},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        {"prompt": "Hi", "answers": ["Yes", "No"]},
        {"article": "Hi", "highlights": "Yes"},
        {"prompt": "Hi"},
        {"messages": asked, "answer": "Yes"},
        {"token_ids": [3, 4]},
    )
    data = read_calibration_data(path, text.tokenizer, text.chat)
    prompt = tuple(text.chat.prompt_ids(asked, text.tokenizer))
    whole = tuple(text.chat.prompt_ids(answered, text.tokenizer, add_generation_prompt=False))
    plain = tuple(text.tokenizer.encode("plain"))
    assert data.samples == (plain, prompt, whole, whole, whole, whole, prompt, whole, (3, 4))
    assert data.records == 9
    assert data.num_tokens == sum(map(len, data.samples))
    bare = read_calibration_data(path, text.tokenizer, None, samples=3)
    assert bare.samples[1] == tuple(text.tokenizer.encode("Hi\nYes"))  # records 1, 4 and 7
    as_list = tmp_path / "a.json"
    as_list.write_text(json.dumps([{"text": "plain"}, {"token_ids": [3, 4]}]))
    assert read_calibration_data(as_list, text.tokenizer, None).samples == (plain, (3, 4))


def test_samples_are_spread_and_cut(tmp_path: Path, text: TextParts) -> None:
    path = lines(tmp_path / "a.jsonl", *({"token_ids": [n] * 40} for n in range(100)))
    data = read_calibration_data(path, None, None, samples=4, length=16)
    assert [one[0] for one in data.samples] == [0, 25, 50, 75]
    assert {len(one) for one in data.samples} == {16}
    book = tmp_path / "book.txt"
    book.write_text("".join(chr(97 + n % 26) for n in range(1000)))
    data = read_calibration_data(book, text.tokenizer, text.chat, samples=5, length=64)
    assert data.records == 15
    assert {len(one) for one in data.samples} == {64}
    assert len(set(data.samples)) == 5
    book.write_text("abc")
    assert read_calibration_data(book, text.tokenizer, None).samples == (tuple(b"abc"),)


@pytest.mark.parametrize(
    ("records", "reported"),
    [
        (["{"], r"1: not JSON"),
        ([[1]], r"1: list instead of an object"),
        ([{"text": " "}], r"1: a text is missing or empty"),
        ([{"text": "a"}, {"title": "b"}], r"2: none of the known fields among \['title'\]"),
        ([{"messages": []}], r"1: messages is not a list"),
        ([{"messages": ["Hi"]}], r"1: a message without role"),
        ([{"messages": [{"role": "judge", "content": "Hi"}]}], r"1: messages\[0\]\.role"),
        ([{"token_ids": ["a"]}], r"1: token_ids is not a list"),
        ([{"token_ids": []}], r"1: it has no tokens"),
        ([""], "has no records"),
        ([{"text": ""}] * 9, "and 4 more"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, text: TextParts, records: list[Any], reported: str) -> None:
    path = lines(tmp_path / "bad.jsonl", *records)
    with pytest.raises(ConfigError, match=reported):
        read_calibration_data(path, text.tokenizer, text.chat)


def test_bad_files_are_refused(tmp_path: Path, text: TextParts) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration_data(tmp_path / "none.txt", text.tokenizer, None)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_calibration_data(tmp_path / "a.txt", text.tokenizer, None)
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="empty"):
        read_calibration_data(tmp_path / "b.txt", text.tokenizer, None)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be a list"):
        read_calibration_data(tmp_path / "c.json", text.tokenizer, None)
    (tmp_path / "d.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_calibration_data(tmp_path / "d.json", text.tokenizer, None)
    (tmp_path / "e.txt").write_text("text")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        read_calibration_data(tmp_path / "e.txt", None, None)
    (tmp_path / "f.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(ConfigError, match=r"f\.safetensors is not a text file.*\.jsonl.*calib"):
        read_calibration_data(tmp_path / "f.safetensors", text.tokenizer, None)
    with pytest.raises(ConfigError, match="0 samples"):
        read_calibration_data(tmp_path / "e.txt", text.tokenizer, None, samples=0)


def test_ranges_come_back_under_their_key_alone(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ChannelRange(8)
    own.add(inputs(20, 8))
    with open_checkpoint(folder) as source:
        key = calibration_key(source, "ab" * 32, [[1, 2], [3]], 512, "fp16")
        assert key == calibration_key(source, "ab" * 32, [(1, 2), (3,)], 512, "fp16")
    path = cache_path(tmp_path / "engine")
    assert path.parent == tmp_path
    monkeypatch.chdir(tmp_path)
    assert cache_path(Path(".")) == tmp_path.with_name(f"{tmp_path.name}.calibration.safetensors")
    assert read_ranges(path, key) is None
    write_ranges(path, key, {"layers.0.mlp.down_proj": own})
    found = read_ranges(path, key)
    assert found is not None
    assert found.keys() == {"layers.0.mlp.down_proj"}
    assert torch.equal(found["layers.0.mlp.down_proj"].absmax(), own.absmax())
    for change in ({"length": 256}, {"dtype": "bf16"}, {"ids_sha256": ""}, {"layers": (0, 1)}):
        assert read_ranges(path, key.replace(**change)) is None
    path.write_bytes(path.read_bytes()[:100])
    assert read_ranges(path, key) is None
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_another_weight_is_another_key(tmp_path: Path, folder: Path) -> None:
    other = write_tiny(tmp_path / "other", seed=1)
    keys = []
    for place in (folder, other):
        with open_checkpoint(place) as source:
            keys.append(calibration_key(source, "", [[1]], 8, "fp16").checkpoint_sha256)
    assert keys[0] != keys[1]
