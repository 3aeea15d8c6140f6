"""Sampling values that a checkpoint recommends.

Owns the reading of generation_config.json as sampling parameters. Knows nothing of requests.

    default_params({"do_sample": True, "top_p": 0.8})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.config.sampling import SamplingParams

_NAMES = ("top_k", "top_p", "min_p", "repetition_penalty")


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a generation_config: sampling only when it says ``do_sample``.

    Values outside their range (``top_k: null`` …) fall back to Ingot's defaults, as do absent ones.
    """
    values: dict[str, Any] = {}
    sampling = bool(generation.get("do_sample"))
    if sampling:
        values["temperature"] = float(generation.get("temperature") or 1.0)
        values |= {k: generation[k] for k in _NAMES[:3] if generation.get(k) is not None}
    if generation.get("repetition_penalty"):
        values["repetition_penalty"] = generation["repetition_penalty"]
    if isinstance(generation.get("max_new_tokens"), int):
        values["max_new_tokens"] = generation["max_new_tokens"]
    return SamplingParams(**values)
