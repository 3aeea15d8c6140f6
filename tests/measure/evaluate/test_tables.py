"""Records from CSV and Parquet files and from data sets of the hub, and columns under other names.

Neither pyarrow nor datasets is needed: modules of the same calls stand in their place.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

from ingot.building.calibration.sample_records import made_of, raw_file, read_records
from ingot.config.files.record_columns import renamed_columns
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, DeviceError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.scored_answers import question_check
from ingot.measure.evaluate.scored_transcripts import recording_check
from tests.e2e.terminal import ingot
from tests.tiny_models import random_ids, save_model, tiny_config

SPEECH = Path(__file__).parents[3] / "examples" / "speech"


def recording() -> Path:
    """One that ships."""
    line = (SPEECH / "manifest.jsonl").read_text().splitlines()[0]
    return SPEECH / json.loads(line)["audio"]


def csv_file(folder: Path, text: str, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.CSV", ","), ("a.tsv", "\t")])
def test_a_table_of_articles(tmp_path: Path, name: str, comma: str) -> None:
    rows = [
        ["id", "article", "highlights"],
        ["x1", '"Two\nlines, ""quoted"""', "Short é."],
        ["", "Next", "End."],
    ]
    text = "\ufeff" + "".join(comma.join(row) + "\r\n" for row in rows)
    data = read_data(csv_file(tmp_path, text, name), needs=question_check)
    assert [(i.number, i.id, i.article, i.references) for i in data.items] == [
        (2, "x1", 'Two\nlines, "quoted"', ("Short é.",)),
        (4, None, "Next", ("End.",)),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_space_after_each_comma_belongs_to_no_cell(tmp_path: Path, end: str) -> None:
    lines = ['"article", highlights ', 'A text, "Short, clear."', ""]
    (item,) = read_data(csv_file(tmp_path, end.join(lines)), needs=question_check).items
    assert (item.article, item.references) == ("A text", ("Short, clear.",))


def test_a_space_in_a_cell_stays_where_the_header_has_none(tmp_path: Path) -> None:
    (item,) = read_data(csv_file(tmp_path, "id,text\n1, a\n")).items
    assert item.text == " a"


def test_an_abstract_is_the_summary_of_an_article_alone() -> None:
    assert renamed_columns({"article": "a", "abstract": "b"}) == {"highlights": "abstract"}
    assert renamed_columns({"document": "a", "abstract": "b"})["highlights"] == "abstract"
    assert renamed_columns({"prompt": "a", "abstract": "b"}) == {}
    assert renamed_columns({"article": "a", "summary": "s", "abstract": "b"}) == {}


def test_lists_in_cells_are_json(tmp_path: Path) -> None:
    text = 'prompt,answers\nWho?,"[""A"", ""B""]"\n'
    (item,) = read_data(csv_file(tmp_path, text)).items
    assert item.references == ("A", "B")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty file"),
        ("one,two\n1,2\n", "line 1: one, two"),
        ("article,article\na,b\n", "line 1: 'article'"),
        ("article,highlights\na,b\nc\n", "line 3: 1 columns, and the header has 2"),
        ('article,highlights\n"a\nb",c\nd, \n', "line 4: highlights is empty"),
        ("document,summary\n ,b\n", "line 2: document is empty"),
        ("prompt,answers\na,b\n", "line 2: column answers is not JSON"),
        ('article,highlights\na,"b\n', "line 2: unexpected end of data"),
        ("article,highlights\n", "no records"),
    ],
)
def test_what_is_wrong_with_a_table_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = csv_file(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_data(path, needs=question_check)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\nfine\n\xff\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_data(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("record", "renamed"),
    [
        ({"document": "d", "summary": "s"}, {"article": "document"}),
        ({"article": "a", "abstract": "s"}, {"highlights": "abstract"}),
        ({"question": "q", "answer": "a"}, {"prompt": "question"}),
        ({"audio_filepath": "a.wav", "text": "t"}, {"audio": "audio_filepath"}),
        ({"audio": "a.wav", "sentence": "t"}, {"text": "sentence"}),
        ({"file_name": "a.flac", "transcription": "t"}, {"audio": "file_name", "text": "transcription"}),
        ({"file_name": "a.JPG", "text": "t"}, {"image": "file_name"}),
        ({"text": "t", "question": "q", "document": "d"}, {}),  # our own names come first
        ({"article": "a", "highlights": "h", "abstract": "s"}, {}),
    ],
)
def test_columns_under_other_names(record: dict[str, Any], renamed: dict[str, str]) -> None:
    assert renamed_columns(record) == renamed


def test_recordings_of_a_table_are_beside_it(tmp_path: Path) -> None:
    name = recording()
    (tmp_path / name.name).write_bytes(name.read_bytes())
    path = csv_file(tmp_path, f"file_name,sentence,language\n{name.name},Hello,\nnone.wav,Hello,en\n")
    data = read_data(path, needs=recording_check(tmp_path), skip_bad=True)
    assert [(item.audio, item.text, item.language) for item in data.items] == [(name.name, "Hello", None)]
    assert "none.wav" in data.bad[0].why


def test_a_build_reads_tables_of_samples(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "sentence\nOne\nTwo\n")
    records = read_records(path, raw_file(path), "shapes")
    assert made_of(path, records, lambda record: record["text"], "shapes") == ["One", "Two"]
    bad = csv_file(tmp_path, "text,id\nOne\n")
    with pytest.raises(ConfigError, match="calib") as error:
        made_of(bad, read_records(bad, raw_file(bad), "shapes"), lambda record: record, "shapes")
    assert "2: 1 columns" in str(error.value)


# --- libraries -------------------------------------------------------------------------------------------


class ArrowError(Exception):
    """As pyarrow.ArrowException."""


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rows by path or by data set, as the libraries give them."""
    rows: dict[str, Any] = {}

    class Batch(list):
        def to_pylist(self) -> list[Any]:
            return list(self)

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            if str(path) not in rows:
                raise ArrowError("magic bytes not found")
            self.rows = rows[str(path)]

        def iter_batches(self, batch_size: int) -> Iterator[Batch]:
            yield from (Batch(self.rows[i : i + 2]) for i in range(0, len(self.rows), 2))

    class Audio:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class Streamed:
        def __init__(self, found: list[Any], features: dict[str, Any]) -> None:
            self.found, self.features = found, features

        def decode(self, enable: bool) -> Streamed:
            return Streamed(self.found, {name: Audio(enable) for name in self.features})

        def __iter__(self) -> Iterator[Any]:
            assert not any(isinstance(one, Audio) and one.decode for one in self.features.values())
            yield from self.found

    def load_dataset(*names: str, split: str, streaming: bool) -> Streamed:
        if (*names, split) not in rows:
            raise ValueError(f"Unknown split {split!r}")
        assert streaming
        found = rows[(*names, split)]
        held = isinstance(found, list) and found and "audio" in found[0]
        return Streamed(found, {"audio": Audio()} if held else {})

    arrow, parquet, datasets = ModuleType("pyarrow"), ModuleType("pyarrow.parquet"), ModuleType("datasets")
    arrow.ArrowException, arrow.parquet, parquet.ParquetFile = ArrowError, parquet, ParquetFile  # type: ignore
    datasets.Audio, datasets.load_dataset = Audio, load_dataset  # type: ignore[attr-defined]
    for module in (arrow, parquet, datasets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    real = importlib.util.find_spec
    fake = {"pyarrow", "datasets"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in fake or real(name))
    return rows


def test_a_parquet_file(tables: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1\0")
    tables[str(path)] = [{"article": f"a{i}", "highlights": "h", "image": None} for i in range(5)]
    data = read_data(path, limit=3, needs=question_check)
    assert [(item.number, item.article) for item in data.items] == [(1, "a0"), (2, "a1"), (3, "a2")]
    tables[str(path)][3]["highlights"] = " "
    with pytest.raises(ConfigError, match="row 4: highlights is empty"):
        read_data(path, needs=question_check)
    assert len(read_records(path, raw_file(path), "")) == 5
    (tmp_path / "b.parquet").write_bytes(b"PAR0")
    with pytest.raises(ConfigError, match="magic bytes"):
        read_data(tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"cannot be read.*nowhere"):
        read_data(tmp_path / "nowhere.parquet")


def test_recordings_inside_a_data_set(tables: dict[str, Any]) -> None:
    sound = recording()
    cell = {"bytes": sound.read_bytes(), "path": f"../../{sound.name}"}
    tables["openslr/librispeech_asr", "clean", "test"] = [
        {"file": "f", "audio": cell, "text": "HELLO", "id": "1-2"},
        {"file": "f", "audio": {"bytes": None, "path": None}, "text": "HELLO", "id": "1-3"},
    ]
    path = Path("hf:openslr/librispeech_asr:clean:test")
    data = read_data(path, limit=1, needs=recording_check(path.parent))
    (item,) = data.items
    assert item.audio is not None
    assert Path(item.audio).read_bytes() == cell["bytes"]
    assert Path(item.audio).suffix == sound.suffix
    assert ".." not in item.audio
    again = read_data(path, limit=1, needs=recording_check(path.parent))
    assert again.facts()["sha256"] == data.facts()["sha256"]  # not of the file's name
    with pytest.raises(ConfigError, match="row 2: column audio has neither"):
        read_data(path)


def test_samples_and_urls_inside_a_data_set(tables: dict[str, Any], tmp_path: Path) -> None:
    """Two channels as an array; a picture and a recording that lie elsewhere."""
    samples = np.random.default_rng(0).uniform(-1, 1, (800, 2)).astype(np.float32)
    elsewhere = {"bytes": None, "path": f"file://{recording()}"}
    tables["a/b", "test"] = [
        {"audio": {"array": samples, "sampling_rate": 8000}, "text": "A"},
        {"audio": elsewhere, "text": "B"},
        {"audio": {"bytes": None, "path": "file:///no/such.flac"}, "text": "C"},
    ]
    first, second = read_data(Path("hf:a/b:test"), limit=2).items
    found, rate = soundfile.read(str(first.audio), dtype="float32")
    assert rate == 8000
    assert np.array_equal(found, samples)
    assert Path(str(second.audio)).read_bytes() == recording().read_bytes()
    with pytest.raises(ConfigError, match=r"row 3: column audio .*no/such"):
        read_data(Path("hf:a/b:test"))
    table = tmp_path / "a.parquet"
    table.write_bytes(b"PAR1")
    tables[str(table)] = [{"audio": elsewhere, "text": "B"}]
    (item,) = read_data(table).items
    assert item.audio == elsewhere["path"]  # a file on disk downloads nothing


def test_a_build_calibrates_on_the_first_rows_of_a_data_set(tables: dict[str, Any], tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "llama")
    read = iter([{"token_ids": random_ids(30, seed=i)} for i in range(9)])
    tables["a/b", "test"] = read
    words = ("build", tmp_path / "llama", "-o", tmp_path / "engine", "--quant", "w4a16", "--group-size", 32)
    words = (*words, "--method", "gptq", "--device", "cpu", "--no-proof")
    done = ingot(*words, "--calib", "hf:a/b:test", "--calib-samples", 4)
    assert done.exit_code == 0, done.output
    calibration = Manifest.read(tmp_path / "engine").calibration
    assert calibration is not None
    assert (calibration.samples, calibration.tokens) == (4, 120)
    assert len(list(read)) == 5  # the others were not asked for
    tables["a/b", "test"] = [{"token_ids": random_ids(30)}, {"token_ids": [-1]}]
    failed = ingot(*words, "--force", "--calib", "hf:a/b:test")
    assert failed.exit_code == 2
    assert "2: " in failed.stderr
    misnamed = ingot(*words, "--force", "--calib", "hf:a/b")
    assert misnamed.exit_code == 2
    assert "hf:ID:CONFIG:SPLIT" in misnamed.stderr


def test_articles_of_a_data_set(tables: dict[str, Any]) -> None:
    tables["abisee/cnn_dailymail", "3.0.0", "test"] = [{"article": "a", "highlights": "h", "id": "1"}] * 3
    tables["EdinburghNLP/xsum", "test"] = [{"document": "a", "summary": "h", "id": "1"}]
    assert len(read_data(Path("hf:abisee/cnn_dailymail:3.0.0:test"), limit=2).items) == 2
    assert read_data(Path("hf:EdinburghNLP/xsum:test"), needs=question_check).items[0].article == "a"
    with pytest.raises(ConfigError, match="Unknown split"):
        read_data(Path("hf:EdinburghNLP/xsum:tset"))


@pytest.mark.parametrize("name", ["hf:", "hf:a/b", "hf:a/b:", "hf:a/b:c:d:e"])
def test_names_that_are_no_data_set(name: str) -> None:
    with pytest.raises(ConfigError, match="hf:ID:CONFIG:SPLIT"):
        read_data(Path(name))


@pytest.mark.parametrize(("data", "module"), [("a.parquet", "pyarrow"), ("hf:a/b:test", "datasets")])
def test_a_library_that_is_missing_is_named(
    data: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(DeviceError, match=rf"{module} is not installed.*\.\[data\]"):
        read_data(Path(data))
    result = ingot("eval", "perplexity", tmp_path, "--data", data)
    assert result.exit_code == 2
    assert module in result.stderr
