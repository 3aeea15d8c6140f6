"""The form that a request wants its answer in, as OpenAI's ``response_format`` or vLLM's fields name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ingot.config.grammar_spec import Grammar
from ingot.errors import RequestError
from ingot.serve.api_errors import bad_request, refused, unsupported
from ingot.serve.request_schemas import Sampling

MAX_SCHEMA_BYTES = 64 << 10
_GUIDED: dict[str, Callable[..., Grammar]] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
}


class AnswerFormat(NamedTuple):
    """A grammar, and the request's field that it comes from."""

    grammar: Grammar
    field: str


def read_format(body: Sampling) -> AnswerFormat | None:
    """The form of the answer's text; None for any.

    Raises:
        ApiError: there are several, one is malformed or too large, or its kind is not supported.
    """
    guided = ((make, getattr(body, name), name) for name, make in _GUIDED.items())
    given = (_response_format(body), *(_form(*one) for one in guided), _structured_outputs(body))
    found = [form for form in given if form is not None]
    if len(found) > 1:
        names = ", ".join(form.field for form in found)
        raise bad_request(f"an answer has one form; the request names {names}", found[1].field)
    return found[0] if found else None


def made(make: Callable[..., Grammar], *args: Any, field: str, **kwargs: Any) -> Grammar:
    """A grammar of a request's values; an ApiError names the field."""
    try:
        return make(*args, **kwargs)
    except RequestError as error:
        raise refused(error, field) from None


def check_size(value: object, field: str) -> None:
    """Raises ApiError for a value that is longer than ``MAX_SCHEMA_BYTES`` as JSON."""
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
    return _form(Grammar.json_schema, schema, field)


def _structured_outputs(body: Sampling) -> AnswerFormat | None:
    value = {} if body.structured_outputs is None else body.structured_outputs
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    if not given:
        return None
    (name, one), *more = given.items()
    field = f"structured_outputs.{name}"
    if more:
        raise bad_request(f"structured_outputs has one key, not {', '.join(given)}", "structured_outputs")
    if name == "json_object" and one is True:
        return AnswerFormat(Grammar.json_object(), field)
    types: dict[str, tuple[type, ...]]
    types = {"json": (str, Mapping), "regex": (str,), "choice": (list,), "json_object": ()}
    if name not in types:
        raise unsupported(field, f"the form {name!r:.80}")
    if not isinstance(one, types[name]):
        raise bad_request(f"{field} is of the wrong type: {type(one).__name__}", field)
    return _form(_GUIDED[f"guided_{name}"], one, field)


def _form(make: Callable[..., Grammar], value: Any, field: str) -> AnswerFormat | None:
    if value is None:
        return None
    check_size(value, field)
    return AnswerFormat(made(make, value, field=field), field)
