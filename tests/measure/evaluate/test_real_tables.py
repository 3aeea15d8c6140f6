"""Files written by pyarrow and data sets read by datasets themselves, in the forms that the hub has.

Skipped without the extra ``data``. ``load_dataset`` streams a local file in the place of the hub's.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ingot.audio.recording_samples import read_audio
from ingot.building.calibration.calibration_data import read_calibration_data
from ingot.building.calibration.sample_records import made_of, raw_file, read_records
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.scored_answers import question_check
from ingot.measure.evaluate.scored_captions import picture_check
from ingot.measure.evaluate.scored_transcripts import recording_check

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Hub = Callable[[Path], Any]
CNN = Path("hf:abisee/cnn_dailymail:3.0.0:test")
LIBRISPEECH = Path("hf:openslr/librispeech_asr:clean:test")
STRING = {"dtype": "string", "_type": "Value"}


def flac(seconds: float = 0.5, seed: int = 0) -> bytes:
    samples = 0.1 * np.random.default_rng(seed).standard_normal(int(16000 * seconds))
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="FLAC")
    return file.getvalue()


def png() -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (4, 4), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def written(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    """A Parquet file; with the ``features`` that data sets of the hub name in its metadata."""
    table = pa.table(columns)
    if features is not None:
        named = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": named})
    pq.write_table(table, path, row_group_size=2)
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """hub(FILE): from now on ``load_dataset`` streams this file, by datasets' own reader."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    real = datasets.load_dataset

    def serve(file: Path) -> Any:
        def load_dataset(*names: str, split: str, streaming: bool) -> Any:
            assert streaming
            assert (*names, split) in {(*str(one)[3:].split(":"),) for one in (CNN, LIBRISPEECH)}
            kind = {".jsonl": "json"}.get(file.suffix, file.suffix[1:])
            return real(kind, data_files=str(file), split="train", streaming=True)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return datasets

    return serve


# --- Parquet files -----------------------------------------------------------------------------------------


def test_columns_of_arrow_s_types(tmp_path: Path) -> None:
    """Large and dictionary-encoded strings, lists, integers, nulls; several row groups."""
    columns = {
        "question": pa.array([f"q{i}" for i in range(5)], pa.large_string()),
        "answers": pa.array([["a"], ["b", "c"], ["d"], ["e"], ["f"]], pa.list_(pa.string())),
        "id": pa.array(range(5), pa.int32()),
        "language": pa.array([None] * 5, pa.string()),
        "kind": pa.array(["x"] * 5).dictionary_encode(),
    }
    data = read_data(written(tmp_path / "a.parquet", columns), needs=question_check, where=[("kind", "x")])
    assert [(i.number, i.id, i.prompt) for i in data.items] == [(n + 1, str(n), f"q{n}") for n in range(5)]
    assert data.items[1].references == ("b", "c")


def test_conversations(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]]
    (item,) = read_data(written(tmp_path / "a.parquet", {"messages": talk})).items
    assert (item.messages, item.references) == (({"role": "user", "content": "hi"},), ("yo",))


def test_files_that_are_none(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.parquet", {"article": ["a"] * 9, "highlights": ["h"] * 9})
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-9])
    (tmp_path / "empty.parquet").write_bytes(b"")
    broken = bytearray(whole.read_bytes())
    broken[4:40] = bytes(36)
    (tmp_path / "broken.parquet").write_bytes(broken)
    for name in ("cut", "empty", "broken"):
        with pytest.raises(ConfigError, match="not a Parquet file"):
            read_data(tmp_path / f"{name}.parquet")
    for name in ("nowhere.parquet", "folder.parquet"):
        (tmp_path / "folder.parquet").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=r"cannot be read|no items|has no"):
            read_data(tmp_path / name)
    none = written(tmp_path / "none.parquet", {"article": pa.array([], pa.string())})
    with pytest.raises(ConfigError, match="no items"):
        read_data(none)


def test_recordings_and_pictures_inside(tmp_path: Path) -> None:
    sound, picture = flac(), png()
    audio = {"audio": [{"bytes": sound, "path": "1.flac"}], "text": ["HELLO"]}
    check = recording_check(tmp_path)
    (item,) = read_data(written(tmp_path / "a.parquet", audio), needs=check).items
    assert item.audio is not None
    assert Path(item.audio).read_bytes() == sound
    image = {"image": [{"bytes": picture, "path": None}], "caption": ["red"]}
    (item,) = read_data(written(tmp_path / "b.parquet", image), needs=picture_check(tmp_path)).items
    assert item.image is not None
    assert Path(item.image).read_bytes() == picture
    assert item.references == ("red",)


def test_samples_instead_of_a_file(tmp_path: Path) -> None:
    """As ``array`` and ``sampling_rate``: every value comes back."""
    samples = np.random.default_rng(1).uniform(-1, 1, 8000).astype(np.float32)
    cell = {"array": samples.tolist(), "sampling_rate": 16000, "path": "x.flac"}
    path = written(tmp_path / "a.parquet", {"audio": [cell], "text": ["HELLO"]})
    (item,) = read_data(path, needs=recording_check(tmp_path)).items
    assert item.audio is not None
    assert np.array_equal(read_audio(Path(item.audio)), samples)
    for bad in (
        {"array": [], "sampling_rate": 16000},
        {"array": [0.1], "sampling_rate": 0},
        {"array": [[[0.1]]]},
    ):
        path = written(tmp_path / "b.parquet", {"audio": [bad], "text": ["HELLO"]})
        with pytest.raises(ConfigError, match="row 1: column audio has neither bytes, a path nor samples"):
            read_data(path)


# --- data sets ---------------------------------------------------------------------------------------------


def test_cnn_dailymail(hub: Hub, tmp_path: Path) -> None:
    columns = {
        "article": [f"(CNN) Story {i}." for i in range(5)],
        "highlights": [f"Line one {i} .\nLine two ." for i in range(5)],
        "id": [f"{i:040x}" for i in range(5)],
    }
    hub(written(tmp_path / "a.parquet", columns, dict.fromkeys(columns, STRING)))
    data = read_data(CNN, limit=3, needs=question_check)
    assert [item.article for item in data.items] == columns["article"][:3]
    assert data.items[0].references == ("Line one 0 .\nLine two .",)
    assert data.facts()["file"] == str(CNN)


def test_librispeech(hub: Hub, tmp_path: Path) -> None:
    """Audio that datasets would decode by torchcodec is taken as it is stored."""
    sounds = [flac(seed=1), flac(seed=2)]
    columns = {
        "file": ["6930-75918-0000.flac", "6930-75918-0001.flac"],
        "audio": [{"bytes": one, "path": f"6930-75918-000{i}.flac"} for i, one in enumerate(sounds)],
        "text": ["CONCORD RETURNED TO ITS PLACE", "NIGHT FELL"],
        "speaker_id": [6930, 6930],
        "chapter_id": [75918, 75918],
        "id": ["6930-75918-0000", "6930-75918-0001"],
    }
    numbers = {name: {"dtype": "int64", "_type": "Value"} for name in ("speaker_id", "chapter_id")}
    features = (
        dict.fromkeys(columns, STRING) | numbers | {"audio": {"sampling_rate": 16000, "_type": "Audio"}}
    )
    datasets = hub(written(tmp_path / "a.parquet", columns, features))
    rows = datasets.load_dataset("openslr/librispeech_asr", "clean", split="test", streaming=True)
    assert isinstance(rows.features["audio"], datasets.Audio)
    assert rows.features["audio"].decode
    data = read_data(LIBRISPEECH, needs=recording_check(LIBRISPEECH.parent))
    assert [Path(str(item.audio)).read_bytes() for item in data.items] == sounds
    assert [(item.id, item.text) for item in data.items] == list(
        zip(columns["id"], columns["text"], strict=True)
    )
    assert "torchcodec" not in sys.modules


def test_pictures_of_a_data_set(hub: Hub, tmp_path: Path) -> None:
    columns = {"image": [{"bytes": png(), "path": "a.png"}], "caption": ["red"]}
    hub(written(tmp_path / "a.parquet", columns, {"image": {"_type": "Image"}, "caption": STRING}))
    (item,) = read_data(CNN, needs=picture_check(CNN.parent)).items
    assert Path(str(item.image)).read_bytes() == columns["image"][0]["bytes"]  # type: ignore[index]


def test_a_recording_that_lies_elsewhere(hub: Hub, tmp_path: Path) -> None:
    """As AudioFolder streams it: a URL without bytes."""
    sound = tmp_path / "one.flac"
    sound.write_bytes(flac())
    cells = [
        {"bytes": None, "path": f"file://{sound}"},
        {"bytes": None, "path": f"file://{tmp_path}/two.flac"},
    ]
    columns = {"audio": cells, "text": ["ONE", "TWO"]}
    hub(written(tmp_path / "a.parquet", columns, {"audio": {"_type": "Audio"}, "text": STRING}))
    (item,) = read_data(LIBRISPEECH, limit=1, needs=recording_check(tmp_path)).items
    assert Path(str(item.audio)).read_bytes() == sound.read_bytes()
    with pytest.raises(ConfigError, match=r"row 2: column audio .*two\.flac"):
        read_data(LIBRISPEECH)


def test_a_data_set_of_json_lines(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"document": "a", "summary": "b"}\n{"document": "c", "summary": "d"}\n')
    hub(path)
    assert [item.article for item in read_data(CNN, needs=question_check).items] == ["a", "c"]


def test_what_the_library_cannot_read(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    hub(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"the data set cannot be read.*hf:abisee"):
        read_data(CNN)


def test_no_such_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the data set cannot be read"):
        read_data(Path("hf:no-such/data-set:test"))


def test_calibration_takes_the_first_rows(hub: Hub, tmp_path: Path) -> None:
    columns = {"token_ids": [[1, 2, 3 + i] for i in range(9)]}
    hub(written(tmp_path / "a.parquet", columns))
    found = read_calibration_data(CNN, None, None, samples=4)
    assert found.samples == tuple((1, 2, 3 + i) for i in range(4))
    assert (found.records, found.path) == (4, CNN)
    again = read_calibration_data(CNN, None, None, samples=4)
    assert again.sha256 == found.sha256 != read_calibration_data(CNN, None, None, samples=5).sha256
    path = tmp_path / "a.parquet"
    evenly = read_calibration_data(path, None, None, samples=3)
    assert evenly.samples == tuple((1, 2, 3 + i) for i in (0, 3, 6))
    assert len(made_of(path, read_records(path, raw_file(path), ""), lambda record: record, "")) == 9
