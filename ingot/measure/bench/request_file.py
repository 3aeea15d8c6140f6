"""Files of requests: ShareGPT's JSON or JSON lines, and records that give lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.config.files.json_text import JsonError, parse_json
from ingot.errors import ConfigError
from ingot.measure.side.token_load import Ask

SHAPES = (
    '[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...], or one record per line; '
    'or {"prompt_tokens": 512, "new_tokens": 128}'
)
_HUMANS = ("human", "user")
_LENGTHS = ("prompt_tokens", "new_tokens")
_BLANK = " \t\r\n"
_SHOWN = 60

Count = Callable[[str], int]
Encode = Callable[[str], Sequence[int]]


def read_requests(path: Path) -> bytes:
    """The bytes of a file, which may be a pipe: it is read once. Raises ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def records_of(path: Path, raw: bytes) -> list[Any]:
    """The records in the bytes of a file: a list in ``.json`` or behind a bracket, else one record per line.

    Raises:
        ConfigError: the file is empty, or is not JSON; it names the first bad record.
    """
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"not UTF-8: {error}") from None
    if not text.strip():
        raise _unreadable(path, "the file is empty")
    if path.suffix != ".json" and text.lstrip()[:1] != "[":
        return list(_lines(path, text))
    try:
        data = parse_json(text)
    except JsonError as error:
        raise _unreadable(path, f"{_bad_record(text)}{error}") from None
    if not isinstance(data, list):
        raise ConfigError(
            "the requests must be a list of conversations",
            seen=f"{path}: {type(data).__name__}",
            allowed=SHAPES,
            field="requests",
        )
    return data


def request_of(record: Any, count: Count) -> Ask | None:
    """The lengths of a record: as it gives them, or of its first turn, a human's, and the answer behind it,
    counted by ``count``. None for any other record.
    """
    if not isinstance(record, dict):
        return None
    if all(name in record for name in _LENGTHS):
        lengths = [record[name] for name in _LENGTHS]
        fits = all(type(length) is int and length >= 1 for length in lengths)
        return Ask(*lengths) if fits else None
    turns = record.get("conversations")
    pair = [turn for turn in turns[:2] if isinstance(turn, dict)] if isinstance(turns, list) else []
    texts: list[Any] = [turn.get("value") for turn in pair]
    if len(pair) != 2 or pair[0].get("from") not in _HUMANS or not all(isinstance(t, str) for t in texts):
        return None
    return Ask(*(count(text) for text in texts))


def gives_lengths(record: Any) -> bool:
    """Whether a record has lengths instead of texts."""
    return isinstance(record, dict) and all(name in record for name in _LENGTHS)


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield parse_json(line)
        except JsonError as error:
            raise _unreadable(path, f"line {number} is not JSON: {line[:_SHOWN]!r} ({error})") from None


def _bad_record(text: str) -> str:
    """``record N: `` for the first element of a list that is not JSON; empty if all elements are, or there is
    no list.
    """
    decoder, number = json.JSONDecoder(), 1
    at = len(text) - len(text.lstrip())
    if text[at : at + 1] != "[":
        return ""
    at += 1
    while True:
        while text[at : at + 1] in (*_BLANK,):
            at += 1
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return f"record {number}: "
        while text[at : at + 1] in (*_BLANK,):
            at += 1
        if text[at : at + 1] != ",":
            return f"after record {number}: " if text[at : at + 1] != "]" else ""
        at, number = at + 1, number + 1


def _unreadable(path: Path, why: object) -> ConfigError:
    return ConfigError("the requests cannot be read", seen=f"{path}: {why}", allowed=SHAPES, field="requests")
