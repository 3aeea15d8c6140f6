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
from ingot.errors import CheckpointError
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


def sliding_window(hf: HfConfig) -> int:
    """Window of every layer, 0 for none.

    Raises:
        CheckpointError: some layers have a window and others do not.
    """
    kinds = set(hf.get("layer_types") or ())
    window = hf.get("sliding_window") or 0
    if kinds == {"full_attention"} or not window or hf.get("use_sliding_window") is False:
        return 0
    full = hf.get("max_window_layers")
    mixed = len(kinds) > 1 or (not kinds and hf.get("use_sliding_window") and full not in (None, 0))
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
    settings: dict[str, Any] = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = float(settings.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    rope = RopeConfig(dim=int(head_dim * float(hf.get("partial_rotary_factor") or 1.0)), theta=theta)
    original = int(settings.get("original_max_position_embeddings") or require(hf, "max_position_embeddings"))
    factor = float(settings.get("factor") or 1.0)
    if kind == "default":
        return rope
    if kind == "linear":
        return rope.replace(scaling="linear", factor=factor)
    if kind == "llama3":
        low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
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
