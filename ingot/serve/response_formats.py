"""The form that a request wants its answer in.

Covers the fields that name one (``response_format``, vLLM's ``guided_*`` and ``structured_outputs``) and the
bound on their size.

    read_format(body)       # Form(Grammar.json_object(), "response_format"), or None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.serve.api_errors import ApiError, bad_request, refused, unsupported
from ingot.serve.request_schemas import Sampling

MAX_SCHEMA_BYTES = 64 << 10


class AnswerFormat(NamedTuple):
    """A grammar, and the request's field that it comes from."""

    grammar: Grammar
    field: str


def read_format(body: Sampling) -> AnswerFormat | None:
    """The form of the answer's text; None for any.

    Raises:
        ApiError: there are several, one is malformed or too large, or its kind is not supported.
    """
    found = [form for read in _READERS if (form := read(body)) is not None]
    if len(found) > 1:
        names = ", ".join(form.field for form in found)
        raise bad_request(f"an answer has one form; the request names {names}", found[1].field)
    return found[0] if found else None


def made(make: Callable[..., Grammar], *args: Any, field: str, **kwargs: Any) -> Grammar:
    """A grammar of a request's values, whose faults name the field.

    Raises:
        ApiError: it is malformed.
    """
    try:
        return make(*args, **kwargs)
    except RequestError as error:
        raise field_error(error, field) from None


def field_error(error: RequestError, field: str) -> ApiError:
    """The error as the field's."""
    found = refused(error)
    found.param = field
    return found


def check_size(value: object, field: str) -> None:
    """Refuse a value that is longer than ``MAX_SCHEMA_BYTES`` as JSON.

    Raises:
        ApiError: it is.
    """
    size = len(value.encode()) if isinstance(value, str) else len(msgspec.json.encode(value))
    if size > MAX_SCHEMA_BYTES:
        raise bad_request(f"{field}: {size} bytes; at most {MAX_SCHEMA_BYTES} are taken", field)


def _response_format(body: Sampling) -> AnswerFormat | None:
    field, value = "response_format", body.response_format
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return AnswerFormat(Grammar.json_object(), field)
    if value.get("type") != "json_schema":
        kinds = "text, json_object or json_schema"
        raise bad_request(f"{field}.type: {value.get('type')!r:.80} is not one of {kinds}", field)
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise bad_request(f"{field}.json_schema.schema must be a JSON schema, an object", field)
    return _schema(schema, field)


def _guided_json(body: Sampling) -> AnswerFormat | None:
    return None if body.guided_json is None else _schema(body.guided_json, "guided_json")


def _guided_regex(body: Sampling) -> AnswerFormat | None:
    return None if body.guided_regex is None else _regex(body.guided_regex, "guided_regex")


def _guided_choice(body: Sampling) -> AnswerFormat | None:
    return None if body.guided_choice is None else _choice(body.guided_choice, "guided_choice")


def _structured_outputs(body: Sampling) -> AnswerFormat | None:
    value = {} if body.structured_outputs is None else body.structured_outputs
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    if not given:
        return None
    (name, one), *more = given.items()
    field = f"structured_outputs.{name}"
    if more:
        raise bad_request(f"structured_outputs has one key, not {', '.join(given)}", "structured_outputs")
    if name == "json" and isinstance(one, (str, Mapping)):
        return _schema(one, field)
    if name == "regex" and isinstance(one, str):
        return _regex(one, field)
    if name == "choice" and isinstance(one, list):
        return _choice(one, field)
    if name == "json_object" and one is True:
        return AnswerFormat(Grammar.json_object(), field)
    if name in ("json", "regex", "choice", "json_object"):
        raise bad_request(f"{field} is of the wrong type: {type(one).__name__}", field)
    raise unsupported(field, f"the form {name!r:.80}")


def _schema(schema: str | Mapping[str, Any], field: str) -> AnswerFormat:
    check_size(schema, field)
    return AnswerFormat(made(Grammar.json_schema, schema, field=field), field)


def _regex(pattern: str, field: str) -> AnswerFormat:
    check_size(pattern, field)
    return AnswerFormat(made(Grammar.regex, pattern, field=field), field)


def _choice(texts: list[Any], field: str) -> AnswerFormat:
    check_size(texts, field)
    return AnswerFormat(made(Grammar.choice, texts, field=field), field)


_READERS = (_response_format, _guided_json, _guided_regex, _guided_choice, _structured_outputs)
