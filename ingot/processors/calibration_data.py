"""Samples to calibrate with, from a file of texts or conversations.

Owns the reading of the file, the choice of records and their encoding to token ids. Knows no model.

    data = read_calibration_data(Path("chats.jsonl"), tokenizer, chat, samples=128, length=512)
    data.samples                                     # token ids, at most 512 each

``.txt`` is one running text, cut into windows; ``.json`` a list of records; anything else a record a line:
``{"text"}``, ``{"token_ids"}``, ``{"messages"}``, ``{"conversations"}`` (ShareGPT's), or ``{"prompt"}`` or
``{"article"}`` with its answer. Conversations go through the chat template, answers included, as the model
sees them when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.json_text import JsonError, parse_json
from ingot.errors import ConfigError, IngotError
from ingot.processors.chat_format import ChatFormat
from ingot.processors.tokenizer_base import Tokenizer

SAMPLES, LENGTH = 128, 512
SHAPES = (
    '{"text": "…"}, {"messages": […]}, {"conversations": […]}, {"prompt" or "article": "…", "answer" or '
    '"answers" or "summary" or "highlights": "…"} or {"token_ids": […]}'
)
_ANSWERS = ("answer", "answers", "summary", "highlights")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_TOLD = 5  # bad records that an error names

Encode = Callable[[Mapping[str, Any]], list[int]]


@dataclass(frozen=True)
class CalibrationData:
    """Samples and where they are from.

    Attributes:
        samples: token ids, none empty.
        records: how many the file holds; of a running text, its windows.
        sha256: of the file.
    """

    path: Path
    samples: tuple[tuple[int, ...], ...]
    records: int
    sha256: str

    @property
    def num_tokens(self) -> int:
        """Of all samples."""
        return sum(len(one) for one in self.samples)


def read_calibration_data(
    path: Path,
    tokenizer: Tokenizer | None,
    chat: ChatFormat | None,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
) -> CalibrationData:
    """At most ``samples`` records, evenly spread over the file, each cut to ``length`` tokens.

    Without a chat format a conversation's contents are joined by line ends.

    Raises:
        ConfigError: a limit is too small, the file cannot be read, a chosen record is no sample, or there is
            none.
    """
    if samples < 1 or length < 2:
        raise ConfigError(
            "calibration needs at least one sample of two tokens or more",
            seen=f"{samples} samples of {length} tokens",
            allowed="at least 1 sample of at least 2 tokens",
            flag="--calib-samples",
        )
    raw = _bytes(path)
    digest = hashlib.sha256(raw).hexdigest()
    if path.suffix == ".txt":
        windows = _windows(_decoded(path, raw), _needed(tokenizer, "a text"), length)
        chosen = [windows[place] for place in _spread(len(windows), samples)]
        return CalibrationData(path, tuple(chosen), len(windows), digest)
    records = list(_elements(path, raw) if path.suffix == ".json" else _lines(path, raw))
    found = [records[place] for place in _spread(len(records), samples)]
    encoded = _encoded(path, found, lambda record: _ids(record, tokenizer, chat))
    kept = tuple(ids[:length] for ids in encoded)
    return CalibrationData(path, kept, len(records), digest)


def _spread(count: int, samples: int) -> list[int]:
    """Places of ``samples`` of ``count`` records, evenly apart, the first among them."""
    if count <= samples:
        return list(range(count))
    return [place * count // samples for place in range(samples)]


def _windows(text: str, tokenizer: Tokenizer, length: int) -> list[tuple[int, ...]]:
    """Neighbouring pieces of a text, each behind what the tokenizer puts before a text; a short rest is left
    out unless it is all there is.
    """
    prefix = tokenizer.prefix_ids
    ids, room = tokenizer.encode(text, add_special_tokens=False), length - len(prefix)
    pieces = [ids[start : start + room] for start in range(0, len(ids), max(room, 1))]
    whole = [piece for piece in pieces if len(piece) == room] or pieces
    return [(*prefix, *piece) for piece in whole]


def _encoded(path: Path, records: Sequence[tuple[int, Any]], encode: Encode) -> list[tuple[int, ...]]:
    """All records' ids; one error for those that give none."""
    found: list[tuple[int, ...]] = []
    bad: list[str] = []
    for number, record in records:
        try:
            ids = encode(_object(record))
            if not ids:
                raise _Bad("it has no tokens")
            found.append(tuple(ids))
        except _Bad as error:
            bad.append(f"{number}: {error}")
        except IngotError as error:
            bad.append(f"{number}: {error.what}")
    if bad or not found:
        rest = f" and {len(bad) - _TOLD} more" if len(bad) > _TOLD else ""
        raise ConfigError(
            f"{path} has records that cannot be used as samples" if bad else f"{path} has no records",
            seen="; ".join(bad[:_TOLD]) + rest if bad else None,
            allowed=SHAPES,
            flag="--calib",
        )
    return found


class _Bad(Exception):
    """Why a record is no sample."""


def _ids(record: Mapping[str, Any], tokenizer: Tokenizer | None, chat: ChatFormat | None) -> list[int]:
    if "token_ids" in record:
        ids = record["token_ids"]
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise _Bad("token_ids is not a list of token ids")
        return ids
    own = _needed(tokenizer, "a text")
    if "text" in record:
        return own.encode(_text(record["text"]))
    messages = _messages(record)
    if chat is None:
        return own.encode("\n".join(message["content"] for message in messages))
    ends = messages[-1]["role"] == "user"
    return chat.prompt_ids(messages, own, add_generation_prompt=ends)


def _messages(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation of a record; its own answer follows a user's last word."""
    if "messages" in record:
        found = [_message(one, "role", "content") for one in _list(record["messages"], "messages")]
    elif "conversations" in record:
        found = [_message(one, "from", "value") for one in _list(record["conversations"], "conversations")]
    else:
        asked = next((record[name] for name in ("prompt", "article") if name in record), None)
        if asked is None:
            raise _Bad(f"none of the known fields among {sorted(map(str, record))[:8]}")
        found = [{"role": "user", "content": _text(asked)}]
    answer = next((record[name] for name in _ANSWERS if name in record), None)
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    if answer is not None and found[-1]["role"] == "user":
        found.append({"role": "assistant", "content": _text(answer)})
    return found


def _message(one: object, who: str, what: str) -> dict[str, str]:
    role = one.get(who) if isinstance(one, dict) else None
    if not isinstance(one, dict) or not isinstance(role, str):
        raise _Bad(f"a message without {who}")
    return {"role": _ROLES.get(role, role), "content": _text(one.get(what))}


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _Bad(f"{name} is not a list of messages")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Bad("a text is missing or empty")
    return value


def _object(record: object) -> Mapping[str, Any]:
    if isinstance(record, _Bad):
        raise record
    if not isinstance(record, dict):
        raise _Bad(f"{type(record).__name__} instead of an object")
    return record


def _lines(path: Path, raw: bytes) -> Iterator[tuple[int, Any]]:
    """(line, record), a line that is no JSON as the error that it is; blank lines are passed over."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except JsonError as error:
                yield number, _Bad(f"not JSON: {line[:40].decode('utf-8', 'replace')!r} ({error})")


def _elements(path: Path, raw: bytes) -> Iterator[tuple[int, Any]]:
    try:
        found = parse_json(_decoded(path, raw))
    except JsonError as error:
        raise ConfigError("the data is not JSON", seen=f"{path}: {error}", flag="--calib") from None
    if not isinstance(found, list):
        seen = f"{path}: {type(found).__name__}"
        raise ConfigError("a .json file must be a list of records", seen=seen, allowed=SHAPES, flag="--calib")
    yield from enumerate(found, start=1)


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(
            f"{what} needs a tokenizer, but the checkpoint has none",
            allowed='{"token_ids": […]}',
            flag="--calib",
        )
    return tokenizer


def _decoded(path: Path, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8", seen=error, flag="--calib, converted to UTF-8") from None
    if not text.strip():
        raise ConfigError("the data is empty", seen=path, flag="--calib")
    return text


def _bytes(path: Path) -> bytes:
    """The file without a byte-order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError("the data cannot be read", seen=error, flag="--calib") from None
    if b"\0" in raw:
        raise ConfigError(
            f"{path} is not a text file",
            seen="bytes of value 0",
            allowed="texts or records in UTF-8: .jsonl, .json or .txt",
            flag="--calib",
        )
    return raw.removeprefix(b"\xef\xbb\xbf")
