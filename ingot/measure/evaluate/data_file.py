"""Files of items: JSON lines, JSON lists, tables, data sets of the hub, running text and folders."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.audio.librispeech import TRANSCRIPTS, librispeech, transcripts
from ingot.config.files.json_text import JsonError, parse_json
from ingot.config.files.table_rows import PARQUET, BadRow, is_hub, is_table, table_rows
from ingot.errors import ConfigError
from ingot.image.picture_folder import picture_files
from ingot.measure.evaluate.data_item import SHAPES, BadRecord, DataItem, item_of

_SHOWN = 5  # bad lines that an error names with their reasons, or values of a field
_MOST_OTHERS, _MOST_LETTERS = 10_000, 40
OfFolder = Callable[[Path], Iterator[tuple[int, Any]]]


@dataclass(frozen=True)
class Bad:
    """A line, or an element of a list (from 1), that cannot be used, and why."""

    number: int
    why: str


@dataclass(frozen=True)
class DataFile:
    """The items, the lines that were skipped, and how the items were chosen."""

    path: Path
    items: tuple[DataItem, ...]
    bad: tuple[Bad, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    limit: int | None = None

    @property
    def folder(self) -> Path:
        """Paths of recordings and pictures are relative to it."""
        return self.path if self.path.is_dir() else self.path.parent

    def facts(self) -> dict[str, Any]:
        again = self.path.is_file() or self.path.is_dir()  # a pipe cannot be read again
        return {
            "file": str(self.path),
            "sha256": _sha256(self.path) if again else _sha256_of_items(self.items),
            "where": dict(self.where),
            "limit": self.limit,
            "items": len(self.items),
            "bad_lines": [bad.number for bad in self.bad],
        }


def read_data(
    path: Path,
    *,
    limit: int | None = None,
    skip_bad: bool = False,
    where: Sequence[tuple[str, str]] = (),
    needs: Callable[[DataItem], str | None] = lambda item: None,
    of_folder: OfFolder = librispeech,
) -> DataFile:
    """The first ``limit`` items of a file (None: all).

    ``.txt`` is one running text, ``.json`` a list of records, ``.csv``, ``.tsv`` and ``.parquet`` tables,
    ``hf:ID[:CONFIG]:SPLIT`` a data set of the hub, anything else one record per line.

    Args:
        skip_bad: skip bad lines instead of refusing the file.
        where: (field, value) pairs: only records that have all of them.
        needs: why the evaluation cannot use an item; None if it can.
        of_folder: the numbered records of a folder.

    Raises:
        ConfigError: the file cannot be read, holds bad lines, or nothing of it can be used.
    """
    if path.suffix == ".txt":
        if where:
            raise ConfigError(
                "a .txt file has no fields to filter by", seen=path, field="where", fix="leave out `where`"
            )
        return DataFile(path, (_running_text(path, needs),))
    records = of_folder(path) if path.is_dir() else _records(path)
    items: list[DataItem] = []
    bad: list[Bad] = []
    others: list[Any] = []  # a few records that do not match
    for number, record in records:
        if limit is not None and len(items) == limit:
            break
        try:
            if isinstance(record, BadRow):
                raise BadRecord(str(record))
            if isinstance(record, BadRecord):
                raise record
            matches = isinstance(record, dict) and all(
                field in record and str(record[field]) == value for field, value in where
            )
            if matches or not where:
                item = item_of(record, number)
                why = needs(item)
                if why is not None:
                    raise BadRecord(why)
                items.append(item)
            elif len(others) < _MOST_OTHERS:
                others.append(record)
        except BadRecord as error:
            bad.append(Bad(number, str(error)))
    if where and not items and not bad:
        raise _no_match(path, where, others)
    _check(path, items, bad, skip_bad)
    return DataFile(path, tuple(items), tuple(bad), tuple(where), limit)


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if is_table(path):
        return table_rows(path, "data")
    return _elements(path) if path.suffix == ".json" else _lines(path)


def _unit(path: Path) -> str:
    """What a number in an error counts."""
    if is_hub(path) or path.suffix.lower() == PARQUET:
        return "row"
    return "record" if path.suffix == ".json" else "line"


def _running_text(path: Path, needs: Callable[[DataItem], str | None]) -> DataItem:
    text = _decoded(path)
    if not text.strip():
        raise ConfigError("the text is empty", seen=path, field="data")
    item = DataItem(1, text=text)
    why = needs(item)
    if why is not None:
        raise ConfigError(
            "a .txt file is running text, which only perplexity and divergence read",
            seen=f"{path}: {why}",
            allowed="records with a question and its answer, in .jsonl or .json (docs/evaluation.md)",
            field="data",
            fix="`data=FILE.jsonl`",
        )
    return item


def _no_match(path: Path, where: Sequence[tuple[str, str]], others: list[Any]) -> ConfigError:
    """Names the values that records have."""
    wanted = " and ".join(f"{field}={value}" for field, value in where)
    records = [record for record in others if isinstance(record, dict)]
    lines = []
    for field, _ in where:
        counts = Counter(str(record[field])[:_MOST_LETTERS] for record in records if field in record)
        few = ", ".join(value for value, _ in counts.most_common(_SHOWN))
        more = f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else ""
        lines.append(f"{field}: {few}{more}" if counts else f"no record has {field}")
    if not any(field in record for record in records for field, _ in where):
        names = dict.fromkeys(str(name) for record in records for name in record)
        lines.append(f"fields: {', '.join(names)}")
    return ConfigError(f"no record of {path} has {wanted}", seen="; ".join(lines), field="where")


def _check(path: Path, items: list[DataItem], bad: list[Bad], skip_bad: bool) -> None:
    if bad and not skip_bad:
        unit = _unit(path)
        lines = [f"{unit} {one.number}: {one.why}" for one in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            lines.append(
                f"and {len(bad) - _SHOWN} more: {', '.join(str(b.number) for b in bad[_SHOWN:][:20])}"
            )
        count = f"{len(bad)} {unit}s" if len(bad) > 1 else f"one {unit}"
        raise ConfigError(
            f"{count} of {path} cannot be used",
            seen="; ".join(lines),
            allowed=SHAPES,
            field="skip_bad",
            fix=f"`skip_bad`, or correct the {unit}s",
        )
    if not items:
        seen = f"{len(bad)} bad lines and nothing else" if bad else "no records"
        raise ConfigError(f"{path} has no items", seen=seen, allowed=SHAPES, field="data")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line that is not blank, with its number; a ``BadRecord`` for one that is not JSON."""
    for number, line in enumerate(_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line.decode("utf-8"))
        except UnicodeDecodeError:
            yield number, BadRecord("not UTF-8")
        except JsonError as error:
            yield number, BadRecord(f"not JSON: {line[:60].decode('utf-8', 'replace')!r} ({error})")


def _elements(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        found = parse_json(_decoded(path))
    except JsonError as error:
        raise ConfigError("the data is not JSON", seen=f"{path}: {error}", field="data") from None
    if not isinstance(found, list):
        raise ConfigError(
            "a .json file must be a list of records",
            seen=f"{path}: {type(found).__name__}",
            allowed=SHAPES,
            field="data",
        )
    yield from enumerate(found, start=1)


def _decoded(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8", seen=error, field="data", fix="`data`, converted to UTF-8"
        ) from None


def _bytes(path: Path) -> bytes:
    """The file without a byte-order mark."""
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError("the data cannot be read", seen=error, field="data") from None


def _sha256_of_items(items: Sequence[DataItem]) -> str:
    """Of what was read of a data set of the hub or a pipe, recordings and pictures by their bytes."""
    found = hashlib.sha256()
    for item in items:
        found.update(repr(replace(item, audio=None, image=None)).encode())
        for file in (item.audio, item.image):
            found.update(b"" if file is None else Path(file).read_bytes())
    return found.hexdigest()


def _sha256(path: Path) -> str:
    """Of a file, or of a folder's transcripts, captions or pictures in order."""
    found = hashlib.sha256()
    of_folder = transcripts if any(path.rglob(TRANSCRIPTS)) else picture_files
    for file in of_folder(path) if path.is_dir() else [path]:
        found.update(file.read_bytes())
    return found.hexdigest()
