"""Rotary settings of Hugging Face configs: ``rope_theta``, ``rope_scaling``, ``rope_parameters``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ingot.config.decoder_config import RopeConfig
from ingot.errors import CheckpointError
from ingot.models.config_keys import check_keys
from ingot.models.hf_values import HfConfig, integer, number, optional_integer

_ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL})
_TYPES: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "beta_fast", "beta_slow", "attention_factor"}),
}
# "finetuned" is a note of the first YaRN checkpoints; a length that the type does not use changes nothing.
_ANY_TYPE = frozenset({"rope_type", "type", "rope_theta", _ORIGINAL, "finetuned"})


def rope_from_hf(hf: HfConfig, head_dim: int, max_positions: int) -> RopeConfig:
    """Rotary settings from ``rope_theta`` and ``rope_scaling``, or from the newer ``rope_parameters``.

    Raises:
        CheckpointError: the scaling type, or one of its settings, is not supported.
    """
    name, settings = _settings(hf)
    kind = _kind(name, settings)
    check_keys(settings, _TYPES[kind] | _ANY_TYPE, f"rope type {kind}", name)
    rope = RopeConfig(
        dim=head_dim, theta=number(settings, "rope_theta", default=number(hf, "rope_theta", default=1e4))
    )
    # Beside the settings it wins over the one within, as in Hugging Face's classes.
    original = integer(hf, _ORIGINAL, default=integer(settings, _ORIGINAL, default=max_positions))
    if kind == "linear":
        return rope.replace(scaling="linear", factor=number(settings, "factor"))
    if kind == "llama3":
        return rope.replace(
            scaling="llama3",
            factor=number(settings, "factor"),
            original_max=original,
            low_freq_factor=number(settings, "low_freq_factor"),
            high_freq_factor=number(settings, "high_freq_factor"),
        )
    if kind == "yarn":
        factor = number(settings, "factor", default=max_positions / original)
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0  # YaRN's own, on cosines and sines
        return rope.replace(
            scaling="yarn",
            factor=factor,
            original_max=original,
            beta_fast=number(settings, "beta_fast", default=32.0),
            beta_slow=number(settings, "beta_slow", default=1.0),
            attention_factor=number(settings, "attention_factor", default=magnitude),
        )
    return rope


def longest(hf: HfConfig, rope: RopeConfig, stated: int) -> int:
    """The model's context length.

    YaRN stretches its original length by its factor, whatever ``max_position_embeddings`` says. A linear
    factor applies to ``max_sequence_length`` or an original length, where one is given (Vicuna-16k); else
    ``max_position_embeddings`` may be either length, and is believed.

    Args:
        rope: of the same config.
        stated: by ``max_position_embeddings``.
    """
    if rope.scaling == "yarn":
        return round(rope.original_max * rope.factor)
    if rope.scaling != "linear":
        return stated
    settings = _settings(hf)[1]
    original = optional_integer(hf, _ORIGINAL) or optional_integer(settings, _ORIGINAL)
    if original is not None:
        return max(stated, round(original * rope.factor))
    return max(stated, optional_integer(hf, "max_sequence_length") or 0)


def _settings(hf: HfConfig) -> tuple[str, Mapping[str, Any]]:
    """The key of the rotary settings, and the settings; {} where there are none."""
    given = {key: hf[key] for key in ("rope_parameters", "rope_scaling") if hf.get(key)}
    for key, value in given.items():
        if not isinstance(value, dict):
            raise CheckpointError(
                "rope settings must be an object", seen=f"{key}={value!r}", fix="config.json"
            )
    if len(given) == 2 and given["rope_parameters"] != given["rope_parameters"] | given["rope_scaling"]:
        raise CheckpointError(
            "rope_parameters and rope_scaling of config.json differ", seen=given, fix="remove one of them"
        )
    return next(iter(given.items()), ("rope_scaling", {}))


def _kind(name: str, settings: Mapping[str, Any]) -> str:
    """The scaling's type, by its new key or its old one."""
    kinds = [settings[key] for key in ("rope_type", "type") if settings.get(key)]
    kind = kinds[0] if kinds else "default"
    if kind not in _TYPES or kinds[1:] not in ([], [kind]):
        raise CheckpointError(
            f"unsupported {name} in config.json",
            seen=" and ".join(map(repr, kinds)),
            allowed=", ".join(_TYPES),
            fix="a model with one of these",
        )
    return str(kind)
