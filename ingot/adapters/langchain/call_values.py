"""LangChain's names of sampling values as those of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.config.sampling_params import named_values
from ingot.errors import RequestError

_OLD = ("functions", "function_call", "response_format")
_NOT_OURS = ("stream",)  # LangChain's own, for choosing between ``invoke`` and a stream


def sampling_values(fields: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of ``SamplingParams``: a model's fields, and those of a call over them; None and an
    empty list ask for nothing. Raises RequestError where there is no such value, or the call asks for
    functions or another model.
    """
    given = {name: value for name, value in call.items() if value not in (None, [], ())}
    for name in given:
        if name in _OLD:
            what = "this value is not taken"
            raise RequestError(what, seen=name, fix="bind_tools, with_structured_output, or grammar=")
        if name == "model":
            raise RequestError(
                "the model of a call cannot be changed",
                seen=given[name],
                allowed="the engine that ChatIngot was made with",
                fix="make a ChatIngot for each engine",
            )
    set_fields = {name: value for name, value in fields.items() if value is not None}
    return _named(set_fields) | _named({n: v for n, v in given.items() if n not in _NOT_OURS})


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """``logprobs`` (a boolean) and ``top_logprobs`` (a number) are one number in ``SamplingParams``."""
    wanted, top = values.pop("logprobs", None), values.pop("top_logprobs", None)
    found = named_values(values)
    if top is not None:
        found["logprobs"] = top
    elif isinstance(wanted, bool):
        found["logprobs"] = 0 if wanted else None
    elif wanted is not None:
        found["logprobs"] = wanted
    return found
