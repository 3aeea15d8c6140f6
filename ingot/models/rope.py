"""Rotary settings as Hugging Face configs write them.

Owns the reading of ``rope_theta``, ``rope_scaling`` and ``rope_parameters``. Knows no architecture.

    rope_from_hf({"rope_theta": 500000.0, "max_position_embeddings": 8192}, head_dim=128)
"""

from __future__ import annotations

import math
from typing import Any

from ingot.config.model import RopeConfig
from ingot.errors import CheckpointError
from ingot.models.base import HfConfig, require


def rope_from_hf(hf: HfConfig, head_dim: int) -> RopeConfig:
    """Rotary settings from ``rope_theta`` and ``rope_scaling``, or from the newer ``rope_parameters``.

    Raises:
        CheckpointError: the scaling type is not supported.
    """
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise CheckpointError("rope settings must be an object", seen=settings, fix="config.json")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = float(settings.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    partial = float(settings.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0)
    rope = RopeConfig(dim=int(head_dim * partial), theta=theta)
    original = int(settings.get("original_max_position_embeddings") or require(hf, "max_position_embeddings"))
    if kind == "default":
        return rope
    if kind == "yarn" and settings.get("factor") is None:
        settings = {**settings, "factor": require(hf, "max_position_embeddings") / original}
    factor = float(require(settings, "factor")) if kind in ("linear", "llama3", "yarn") else 1.0
    if kind == "linear":
        return rope.replace(scaling="linear", factor=factor)
    if kind == "llama3":
        low = float(require(settings, "low_freq_factor"))
        high = float(require(settings, "high_freq_factor"))
        return rope.replace(
            scaling="llama3", factor=factor, original_max=original, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return _yarn(rope, settings, factor, original)
    raise CheckpointError(
        "unsupported rope scaling",
        seen=kind,
        allowed="default, linear, llama3, yarn",
        fix="rope_scaling in config.json",
    )


def _yarn(rope: RopeConfig, settings: dict[str, Any], factor: float, original: int) -> RopeConfig:
    unsupported = sorted(set(settings) & {"mscale", "mscale_all_dim"}) + (
        ["truncate"] if settings.get("truncate") is False else []
    )
    if unsupported:
        raise CheckpointError(
            "unsupported yarn settings", seen=unsupported, fix="rope_scaling in config.json"
        )
    return rope.replace(
        scaling="yarn",
        factor=factor,
        original_max=original,
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        attention_factor=float(settings.get("attention_factor") or _yarn_magnitude(factor)),
    )


def _yarn_magnitude(factor: float) -> float:
    """YaRN's 0.1 · ln(factor) + 1 on cosines and sines."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
