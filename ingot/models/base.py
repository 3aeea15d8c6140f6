"""What a model is to the rest of Ingot.

Owns the description of an architecture as data: its Hugging Face names, how its config reads, and its weight
map. Knows no architecture in particular; each file beside this one declares one.

    LLAMA = Architecture(name="llama", hf_names=("LlamaForCausalLM",), config_from_hf=..., weight_map=...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.checkpoint.weight_map import WeightMap
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.context import BuildContext
from ingot.layers.decoder import Decoder

HfConfig = Mapping[str, Any]
LayerRange = tuple[int, int] | None


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes:
        name: Ingot's name, stored in the manifest.
        hf_names: entries of ``architectures`` in config.json that mean this one.
        config_from_hf: config.json → DecoderConfig; raises CheckpointError for what is not supported.
        weight_map: (config of the whole checkpoint, layers to keep) → weight map.
    """

    name: str
    hf_names: tuple[str, ...]
    config_from_hf: Callable[[HfConfig], DecoderConfig]
    weight_map: Callable[[DecoderConfig, LayerRange], WeightMap]

    def read_config(self, hf: HfConfig) -> DecoderConfig:
        """``config_from_hf`` on a file that may hold anything.

        Raises:
            CheckpointError: it lacks a key, or a value is unsupported, of the wrong type or out of range.
        """
        try:
            return self.config_from_hf(hf)
        except ConfigError as error:
            raise CheckpointError(
                error.what, seen=error.seen, allowed=error.allowed, fix="config.json"
            ) from None
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"config.json does not describe a {self.name} model", seen=error, fix="config.json"
            ) from None

    def build(self, config: DecoderConfig, ctx: BuildContext, max_seq_len: int) -> Decoder:
        """The modules, uninitialised, on the current default device."""
        return Decoder(config, ctx, max_seq_len)


def require(hf: HfConfig, *keys: str) -> Any:
    """The value under the first of these keys that the config has.

    Raises:
        CheckpointError: it has none of them.
    """
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    raise CheckpointError(f"config.json lacks {' or '.join(keys)}", seen=sorted(hf), fix="config.json")


def check_silu(hf: HfConfig) -> None:
    """Refuse a gated MLP with another activation than SiLU."""
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(
            "unsupported activation", seen=activation, allowed="silu", fix="hidden_act in config.json"
        )


def sliding_window(hf: HfConfig, default_on: bool = False) -> int:
    """Window of every layer, 0 for none.

    Args:
        default_on: what a config without ``use_sliding_window`` means (Mistral: on, Qwen: off).

    Raises:
        CheckpointError: some layers have a window and others do not.
    """
    kinds = set(hf.get("layer_types") or ())
    window = hf.get("sliding_window") or 0
    if kinds == {"full_attention"} or not window or not hf.get("use_sliding_window", default_on):
        return 0
    full = (hf.get("max_window_layers") or 0) if hf.get("use_sliding_window") and not kinds else 0
    if full and full >= int(require(hf, "num_hidden_layers")):
        return 0
    mixed = len(kinds) > 1 or full > 0
    if mixed:
        raise CheckpointError(
            "layers with and without a sliding window in one model are not supported",
            seen=sorted(kinds) or full,
        )
    return int(window)


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
