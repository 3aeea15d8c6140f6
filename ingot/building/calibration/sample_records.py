"""The records of a file of samples to calibrate with: JSON lines or lists, and which of them are taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ingot.config.files.json_text import JsonError, parse_json
from ingot.config.files.record_columns import in_their_names, with_our_names
from ingot.config.files.table_rows import FILES, BadRow, is_hub, is_table, table_rows
from ingot.errors import ConfigError, IngotError
from ingot.text.tokenizer.tokenizer_base import Tokenizer

_SHOWN = 5  # bad records that an error names
T = TypeVar("T")
Numbered = tuple[int, Any]  # line of a file or place in a list, from 1, and the record


class BadSample(Exception):
    """Why a record is no sample."""


def evenly(found: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of them, evenly apart, the first among them."""
    if len(found) <= count:
        return list(found)
    return [found[place * len(found) // count] for place in range(count)]


def file_records(path: Path, shapes: str, count: int, digest: Any) -> list[Numbered]:
    """The records of a file, whose bytes ``digest`` gets; of a data set of the hub the first ``count``, and
    ``digest`` gets their fields but for recordings and pictures. Errors as of ``read_records``.
    """
    if not is_hub(path):
        raw = raw_file(path)
        digest.update(raw)
        return read_records(path, raw, shapes)
    found = [_numbered(*row) for row in islice(table_rows(path, "calib"), count)]
    for number, record in found:
        own = {k: v for k, v in record.items() if k not in FILES} if isinstance(record, dict) else str(record)
        digest.update(json.dumps([number, own], sort_keys=True, default=str).encode())
    return found


def _numbered(number: int, row: Any) -> Numbered:
    return number, BadSample(str(row)) if isinstance(row, BadRow) else row


def read_records(path: Path, raw: bytes, shapes: str) -> list[Numbered]:
    """The records of a ``.json`` list, of a table, or of any other file one per line; a line that is no JSON
    is a ``BadSample``. Raises ConfigError where it is no list, no table, or not UTF-8.
    """
    if is_table(path):
        return [_numbered(*row) for row in table_rows(path, "calib")]
    if path.suffix == ".json":
        try:
            found = parse_json(decoded(path, raw))
        except JsonError as error:
            raise ConfigError("the data is not JSON", seen=f"{path}: {error}", field="calib") from None
        if not isinstance(found, list):
            what, seen = "a .json file must be a list of records", f"{path}: {type(found).__name__}"
            raise ConfigError(what, seen=seen, allowed=shapes, field="calib")
        return list(enumerate(found, start=1))
    records: list[Numbered] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            try:
                records.append((number, parse_json(line)))
            except JsonError as error:
                bad = BadSample(f"not JSON: {line[:40].decode('utf-8', 'replace')!r} ({error})")
                records.append((number, bad))
    return records


def made_of(
    path: Path, records: Sequence[Numbered], make: Callable[[Mapping[str, Any]], T], shapes: str
) -> list[T]:
    """What ``make`` gives for each record; ConfigError names all that it refused, or says there are none."""
    found: list[T] = []
    bad: list[str] = []
    for number, record in records:
        renamed: dict[str, str] = {}
        try:
            if isinstance(record, BadSample):
                raise record
            if not isinstance(record, dict):
                raise BadSample(f"{type(record).__name__} instead of an object")
            named, renamed = with_our_names(record)
            found.append(make(named))
        except BadSample as error:
            bad.append(f"{number}: {in_their_names(str(error), renamed)}")
        except IngotError as error:
            bad.append(f"{number}: {error.what}")
    if bad or not found:
        rest = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ConfigError(
            f"{path} has records that cannot be used as samples" if bad else f"{path} has no records",
            seen="; ".join(bad[:_SHOWN]) + rest if bad else None,
            allowed=shapes,
            field="calib",
        )
    return found


def text_of(value: object) -> str:
    """A text that is not empty; ``BadSample`` for all else."""
    if not isinstance(value, str) or not value.strip():
        raise BadSample("a text is missing or empty")
    return value


def needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer that something needs; ConfigError where there is none."""
    if tokenizer is None:
        what = f"{what} needs a tokenizer, but the checkpoint has none"
        raise ConfigError(what, allowed='{"token_ids": […]}', field="calib")
    return tokenizer


def decoded(path: Path, raw: bytes) -> str:
    """A file's text; ConfigError where it is not UTF-8, or empty."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "`calib`, converted to UTF-8"
        raise ConfigError(f"{path} is not UTF-8", seen=error, field="calib", fix=fix) from None
    if not text.strip():
        raise ConfigError("the data is empty", seen=path, field="calib")
    return text


def raw_file(path: Path) -> bytes:
    """The file without a byte-order mark; ConfigError where it cannot be read or is no text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError("the data cannot be read", seen=error, field="calib") from None
    if b"\0" in raw and not is_table(path):
        raise ConfigError(
            f"{path} is not a text file",
            seen="bytes of value 0",
            allowed="texts or records in UTF-8: .jsonl, .json, .csv or .txt; or .parquet",
            field="calib",
        )
    return raw.removeprefix(b"\xef\xbb\xbf")
