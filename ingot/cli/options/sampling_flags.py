"""A flag for each sampling value of ``SamplingParams``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ingot.cli.options.flags import flags_for
from ingot.cli.terminal.field_flags import flag_of
from ingot.config.sampling_params import VALUE_NAMES, SamplingParams
from ingot.errors import RequestError

_HELP = {
    "max_new_tokens": "Maximum tokens per answer.",
    "min_new_tokens": "Minimum tokens before an end token.",
    "temperature": "0 is greedy.",
    "top_k": "Sample from the k most likely tokens; 0 or -1: from all.",
    "top_p": "Sample from the most likely tokens that together have this probability.",
    "min_p": "Drop tokens below this fraction of the top token's probability.",
    "repetition_penalty": "Penalizes tokens of the prompt and the answer; 1: off.",
    "presence_penalty": "Penalizes tokens already in the answer; 0: off.",
    "frequency_penalty": "Penalizes tokens by their count in the answer; 0: off.",
    "seed": "Makes sampling reproducible.",
    "stop": "Text that ends an answer; may be repeated.",
    "stop_token_ids": "Token id that ends an answer; may be repeated.",
    "ignore_eos": "Continue past the model's own end tokens.",
    "logprobs": "Log-probabilities of the chosen and the K most likely tokens (shown with --json).",
    "n": "Answers per prompt.",
    "num_beams": "Beam search with this many beams.",
    "length_penalty": "Exponent of the length in a beam's score.",
    "early_stopping": "End beam search as soon as enough beams are finished.",
}
_OFTEN = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "n")
_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def sampling_flags(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a verb's ``sampling`` parameter by a flag per sampling value, except for fields in ``without``.
    The given ones arrive as a dict, checked.
    """
    flags = [_flag(name, hint) for name, hint in _types().items() if name not in without]

    def pack(values: dict[str, Any]) -> dict[str, Any]:
        sampling = {k: v for k, v in values.items() if v is not None and v is not False and v != []}
        check_alone(sampling)
        return sampling

    return lambda verb: flags_for(verb, "sampling", flags, pack)


def check_alone(given: Mapping[str, Any]) -> None:
    """Refuse values that are out of range by themselves, before an engine is loaded."""
    for name, value in given.items():
        if name != "min_new_tokens":  # its range depends on another
            SamplingParams(num_beams=1).replace(**{name: value})


def value_names() -> list[str]:
    """The sampling values that have a flag."""
    return list(_types())


def read_value(name: str, text: str) -> Any:
    """The value of a sampling field from its text."""
    kind = _types()[name]
    is_list = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if is_list else kind
    try:
        value = _SWITCH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        allowed = "on or off" if kind is bool else "an integer" if kind is int else "a number"
        raise RequestError(f"{name} cannot be set to this", seen=text, allowed=allowed) from None
    return (value,) if is_list else value


def _types() -> dict[str, Any]:
    """Field → the type of its flag: the field's own, a list for a tuple."""
    hints = typing.get_type_hints(SamplingParams)
    types = {}
    for name in VALUE_NAMES:
        inner = [a for a in typing.get_args(hints[name]) if a not in (type(None), Ellipsis)]
        is_tuple = typing.get_origin(hints[name]) is tuple
        types[name] = list[inner[0]] if is_tuple else (inner or [hints[name]])[0]  # type: ignore[valid-type]
    return types


def _flag(name: str, kind: Any) -> inspect.Parameter:
    panel = "Sampling" if name in _OFTEN else "Sampling, rarely needed"
    option = typer.Option(flag_of(name), help=_HELP[name], rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
