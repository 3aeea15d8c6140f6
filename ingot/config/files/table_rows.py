"""Rows of tables as records: CSV and Parquet files, and data sets of the Hugging Face hub.

The only module that imports pyarrow and datasets.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ingot.config.files.float_wav import float_wav
from ingot.config.files.json_text import JsonError, parse_json
from ingot.config.files.record_columns import KNOWN
from ingot.errors import ConfigError, DeviceError, to_install

CSV, PARQUET, HUB = (".csv", ".tsv"), ".parquet", "hf:"
Rows = Iterator[tuple[int, Any]]
_MOST_LETTERS = 1 << 27  # of one cell
_BATCH = 256  # rows of a Parquet file at a time
FILES = ("audio", "image")
_LISTS = ("answers", "captions", "messages", "conversations", "token_ids")  # JSON in a cell of a CSV file


class BadRow(Exception):
    """Why a row is no record."""


def is_table(path: Path) -> bool:
    """Whether ``table_rows`` reads it: a CSV or Parquet file, or ``hf:ID[:CONFIG]:SPLIT``."""
    return path.suffix.lower() in (*CSV, PARQUET) or is_hub(path)


def is_hub(path: Path) -> bool:
    """Whether it names a data set of the hub."""
    return str(path).startswith(HUB)


def table_rows(path: Path, field: str) -> Rows:
    """Each row as a record with its number from 1: of a CSV file the line where the row begins, else the row.
    A row that cannot be read is a ``BadRow``. Recordings and pictures inside a table become files that exist
    until the process ends.

    Raises:
        ConfigError: it cannot be read as such a table; it names ``field``.
        DeviceError: the library that reads it is not installed.
    """
    if is_hub(path):
        return _hub_rows(str(path), field)
    return _csv_rows(path, field) if path.suffix.lower() in CSV else _parquet_rows(path, field)


def _csv_rows(path: Path, field: str) -> Rows:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError("the data cannot be read", seen=error, field=field) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        what = f"{path} is not UTF-8"
        raise ConfigError(what, seen=f"line {line}: {error.reason}", field=field) from None
    csv.field_size_limit(_MOST_LETTERS)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    spaced = f"{delimiter} " in text.partition("\n")[0]  # such a file has a space before each cell
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=spaced
    )
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header, field)
        line = reader.line_num + 1
        for row in reader:
            if row:
                yield line, _csv_record(header, row)
            line = reader.line_num + 1
    except csv.Error as error:
        seen = f"line {reader.line_num}: {error}"
        raise ConfigError(f"{path} is not a CSV file", seen=seen, field=field) from None


def _check_header(path: Path, header: list[str], field: str) -> None:
    """The first line must name columns, each once, and one of them that is read."""
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        what = f"{path} has two columns of one name"
        raise ConfigError(what, seen=f"line 1: {twice[0]!r}", field=field)
    if not KNOWN & set(header):
        raise ConfigError(
            f"the first line of {path} names no column that is read",
            seen=f"line 1: {', '.join(header)[:200]}" if header else "an empty file",
            allowed=", ".join(sorted(KNOWN)),
            field=field,
        )


def _csv_record(header: list[str], row: list[str]) -> Any:
    if len(row) != len(header):
        return BadRow(f"{len(row)} columns, and the header has {len(header)}")
    record: dict[str, Any] = dict(zip(header, row, strict=True))
    for name in ("id", "language"):
        if record.get(name) == "":
            del record[name]
    for name in _LISTS:
        if name in record:
            try:
                record[name] = parse_json(record[name])
            except JsonError as error:
                return BadRow(f"column {name} is not JSON ({error})")
    return record


def _parquet_rows(path: Path, field: str) -> Rows:
    _need("pyarrow", "a .parquet file")
    from pyarrow import ArrowException, parquet

    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError("the data cannot be read", seen=error, field=field) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH):
            for record in batch.to_pylist():
                number += 1
                yield number, _with_files(record)
    except (ArrowException, OSError) as error:
        seen = f"{path}, after row {number}: {error}"[:300]
        raise ConfigError("the data is not a Parquet file", seen=seen, field=field) from None


def _hub_rows(name: str, field: str) -> Rows:
    """The rows of ``hf:ID[:CONFIG]:SPLIT``, read as they are needed."""
    parts = name.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        allowed = "hf:ID:SPLIT or hf:ID:CONFIG:SPLIT, for instance hf:abisee/cnn_dailymail:3.0.0:test"
        raise ConfigError("no data set of the hub has this name", seen=name, allowed=allowed, field=field)
    _need("datasets", "a data set of the hub")
    from datasets import load_dataset

    def opened() -> Iterator[Any]:
        rows = load_dataset(*parts[:-1], split=parts[-1], streaming=True)
        # Cells as they are stored; without features they are.
        yield from rows.decode(False) if rows.features else rows

    rows = opened()
    for number in itertools.count(1):
        try:
            record = next(rows, None)
        except Exception as error:  # of the library, of its HTTP clients, of the readers of many formats
            seen = f"{name}, after row {number - 1}: {type(error).__name__}: {error}"[:400]
            raise ConfigError("the data set cannot be read", seen=seen, field=field) from None
        if record is None:
            return
        yield number, _with_files(record, fetches=True)


def _need(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise DeviceError(f"{module} is not installed, and {what} is read with it", fix=to_install("data"))


def _with_files(record: Mapping[str, Any], *, fetches: bool = False) -> Any:
    """The record without empty cells; a recording or picture inside becomes a file's path. ``fetches``: those
    at a URL are downloaded, which no file on disk makes us do.
    """
    found = {name: value for name, value in record.items() if value is not None}
    for name in FILES:
        cell = found.get(name)
        if isinstance(cell, Mapping):
            try:
                found[name] = _file_of(cell, fetches=fetches)
            except (OSError, ValueError, TypeError) as error:
                return BadRow(f"column {name} has neither bytes, a path nor samples ({error})")
    return found


def _file_of(cell: Mapping[str, Any], *, fetches: bool) -> str:
    """The path of a file with a cell's recording or picture: its ``bytes``, the file at its ``path`` (perhaps
    elsewhere), or samples (``array`` with ``sampling_rate``). Raises ValueError where it has none of these.
    """
    data, path, samples = (cell.get(part) for part in ("bytes", "path", "array"))
    if isinstance(data, bytes):
        return _stored(data, str(path or ""))
    if samples is not None:
        return _stored(float_wav(samples, cell.get("sampling_rate")), ".wav")
    if not isinstance(path, str):
        raise ValueError(f"it has {', '.join(map(str, cell)) or 'nothing'}")
    if "://" not in path or not fetches:
        return path
    import fsspec  # comes with datasets

    with fsspec.open(path) as file:
        return _stored(file.read(), path)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ingot-data-")


def _stored(data: bytes, name: str) -> str:
    """The path of a new file; of the recording's own name only the ending is used."""
    ending = PurePosixPath(name).suffix
    ending = ending if re.fullmatch(r"[.][a-zA-Z0-9]{1,5}", ending) else ""
    with tempfile.NamedTemporaryFile(dir=_folder().name, suffix=ending, delete=False) as file:
        file.write(data)
    return file.name
