"""One item to evaluate on, and the shapes of records that it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.config.files.record_columns import REFERENCES, in_their_names, with_our_names

Message = dict[str, str]

SHAPES = (
    '{"text": "…"}, {"audio": "…", "text": "…"}, {"image": "…", "text" or "captions": …}, '
    '{"article": "…", "highlights" or "summary": "…"}, {"prompt": "…" or "messages": […], "answer": "…" or '
    '"answers": […]}, {"conversations": […]} or {"token_ids": […]}'
)
ONLY_CAPTION = "a picture, which only `ingot eval caption` reads"
_CAPTIONS = ("text", "caption", "captions")
_ROLES = {"human": "user", "user": "user", "system": "system", "assistant": "assistant"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")  # ShareGPT's


class BadRecord(Exception):
    """Why a record cannot be used."""


@dataclass(frozen=True)
class DataItem:
    """A record.

    Attributes:
        number: line of the file, or place in its list, from 1.
        id: the record's own.
        text, token_ids: running text, or its ids for a model without a tokenizer.
        audio, language: path of a recording of the text, relative to the data's folder, and its language.
        image: path of a picture, likewise; its captions are the references.
        article, prompt, messages: the question; at most one of them is given.
        references: right answers; the first is the one to show.
    """

    number: int
    id: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    audio: str | None = None
    language: str | None = None
    image: str | None = None
    article: str | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    references: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        questions = (self.article, self.prompt, self.messages)
        return bool(self.references) and any(one is not None for one in questions)


def item_of(record: object, number: int) -> DataItem:
    """The item of a record in any of the shapes of docs/evaluation.md, or BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"{type(record).__name__} instead of an object")
    named, renamed = with_our_names(record)
    try:
        return _item(named, number)
    except BadRecord as error:
        raise BadRecord(in_their_names(str(error), renamed)) from None


def _item(record: dict[str, Any], number: int) -> DataItem:
    name = record.get("id")
    found: dict[str, Any] = {"number": number, "id": None if name is None else str(name)}
    if "image" in record:
        captions = [field for field in _CAPTIONS if record.get(field) is not None]
        return DataItem(**found, image=_text(record, "image"), references=_texts(record, captions))
    if "conversations" in record:
        return DataItem(**found, **_asked(_turns(record["conversations"])))
    answers = [field for field in REFERENCES if field in record]
    if "messages" in record:
        return DataItem(**found, **_asked(_messages(record["messages"]), _texts(record, answers)))
    for field in ("article", "prompt"):
        if field in record:
            asked: dict[str, Any] = {field: _text(record, field)}
            return DataItem(**found, **asked, references=_texts(record, answers))
    if "text" in record:
        spoken: dict[str, Any] = {
            field: _text(record, field) for field in ("audio", "language") if record.get(field) is not None
        }
        return DataItem(**found, **spoken, text=_text(record, "text"))
    if "token_ids" in record:
        return DataItem(**found, token_ids=_ids(record["token_ids"]))
    raise BadRecord(f"none of the known fields among {sorted(map(str, record))[:8]}")


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise BadRecord(f"{field} is {type(value).__name__} instead of text")
    if not value.strip():
        raise BadRecord(f"{field} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{field} holds half of a UTF-16 surrogate pair") from None
    return value


def _texts(record: Mapping[str, Any], given: list[str]) -> tuple[str, ...]:
    """The answers or captions in the one field that is ``given``; () if none is."""
    if len(given) > 1:
        raise BadRecord(f"{given[0]} and {given[1]} cannot be combined")
    if given not in (["answers"], ["captions"]):
        return tuple(_text(record, field) for field in given)
    field = given[0]
    value = record[field]
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{field} is not a list of texts")
    return tuple(_text({field: one}, field) for one in value)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value) or not value:
        raise BadRecord("token_ids is not a list of token ids")
    return tuple(value)


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRecord("messages is not a list of messages")
    return [
        _message(one, "role", "content", {role: role for role in ("system", "user", "assistant")})
        for one in value
    ]


def _turns(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRecord("conversations is not a list of turns")
    return [_message(one, "from", "value", _ROLES) for one in value]


def _message(one: object, who: str, what: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(one, dict) or not isinstance(one.get(what), (str, list)):
        raise BadRecord(f"a message without {who} and {what}")
    if isinstance(one[what], list):
        raise BadRecord(f"{what} is a list of parts; messages are text here, and only caption reads pictures")
    role = one.get(who)
    if not isinstance(role, str) or role not in roles:
        raise BadRecord(f"a message from {role!r}, which is not one of {', '.join(roles)}")
    return {"role": roles[role], "content": _text(one, what)}


def _asked(messages: list[Message], references: tuple[str, ...] = ()) -> dict[str, Any]:
    """The messages before the answer, and the answer: the record's own, or the first of the conversation."""
    if not references:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            return {"messages": tuple(messages)}
        messages, references = messages[: turns[0]], (messages[turns[0]]["content"],)
    if messages[-1]["role"] != "user":
        raise BadRecord("the last message before the answer is not the user's")
    return {"messages": tuple(messages), "references": references}
