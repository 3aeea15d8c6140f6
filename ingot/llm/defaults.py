"""Sampling values that a checkpoint recommends.

Owns the reading of generation_config.json as sampling parameters. Knows nothing of requests.

    default_params({"do_sample": True, "top_p": 0.8})
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ingot.config.sampling import SamplingParams
from ingot.errors import RequestError

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty", "max_new_tokens")


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a generation_config: sampling only when it says ``do_sample``.

    Values outside their range (``top_k: -1``, ``top_p: null`` …) fall back to Ingot's defaults, as do absent
    ones.
    """
    sampling = bool(generation.get("do_sample"))
    params = SamplingParams(temperature=1.0 if sampling else 0.0)
    for name in (*_SAMPLING, *_ALWAYS) if sampling else _ALWAYS:
        if generation.get(name) is not None:
            with suppress(RequestError):
                params = params.replace(**{name: generation[name]})
    return params
