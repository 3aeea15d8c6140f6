"""Sampling values that a checkpoint's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.text.tokenizer.tokenizer import Tokenizer

SAMPLED_FIELDS = ("temperature", "top_k", "top_p", "min_p")
READ_FIELDS = ("repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class Defaults:
    """What a generation_config makes of a request that names nothing.

    Attributes:
        params: the values.
        used: fields whose value is the generation_config's.
        refused: fields whose value there is out of range, with that value.
    """

    params: SamplingParams
    used: frozenset[str]
    refused: dict[str, Any]


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a generation_config: sampling only when it says ``do_sample``. Values outside their
    range (``top_k: -1``, ``top_p: null`` …) fall back to Ingot's defaults, as absent ones do.
    """
    return read_defaults(generation).params


def read_defaults(generation: Mapping[str, Any]) -> Defaults:
    """``default_params`` with the origin of each value; ``do_sample`` without a temperature gives 1.0."""
    sampling = bool(generation.get("do_sample"))
    params = SamplingParams(temperature=1.0 if sampling else 0.0)
    used = {"temperature"} if sampling else set()
    refused = {}
    for name in (*SAMPLED_FIELDS, *READ_FIELDS) if sampling else READ_FIELDS:
        if generation.get(name) is None:
            continue
        try:
            params = params.replace(**{name: generation[name]})
            used.add(name)
        except RequestError:
            refused[name] = generation[name]
    return Defaults(params, frozenset(used), refused)


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    values: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    count: int,
) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts, with the ``values`` that a call names itself over them.

    Raises:
        RequestError: not as many as prompts, no SamplingParams, a value that is unknown or out of range, or
            stop strings without a tokenizer.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [(params or default).replace(**values)] * count
    elif isinstance(params, Sequence) and all(isinstance(v, SamplingParams) for v in params):
        params = [one.replace(**values) for one in params] if values else list(params)
    else:
        raise RequestError(
            "params must be SamplingParams or a list of them", seen=repr(params)[:80], fix="params"
        )
    if len(params) != count:
        raise RequestError(
            "params must be one or as many as prompts", seen=len(params), allowed=count, fix="params"
        )
    if tokenizer is None and any(v.stop for v in params):
        raise RequestError(
            "the engine has no tokenizer to find stop strings with", seen="stop", field="stop_token_ids"
        )
    return params
