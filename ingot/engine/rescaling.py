"""Where the channels of a decoder layer can be rescaled without a change of its outputs.

Owns which norm or product makes the input of each linear layer, and the folding of factors into both. Knows
neither how factors are chosen nor why.

    for site in rescaling_sites(config, layer.index):
        fold(site, scales, layer)         # layer.weight(name), layer.replace(name, tensor)

Two inputs have no site: that of a down product behind a GELU, which is not linear, and that of the head,
whose norm is of no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.config.model import DecoderConfig
from ingot.quant.folding import (
    fold_into_columns,
    fold_into_norm,
    fold_into_rows,
    one_a_class,
    value_rows,
)


class Weights(Protocol):
    """A layer's parameters, which can be replaced (calibrate.py: ``CalibratedLayer``)."""

    def weight(self, name: str) -> torch.Tensor:
        """A parameter by its name in the model."""
        ...

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Another value of the same shape."""
        ...


@dataclass(frozen=True, eq=False)
class RescalingSite:
    """The input of one linear layer and what makes it.

    Attributes:
        reader: the linear layer's name in the model.
        maker: of a norm, or of the linear layer whose ``rows`` make the channels.
        rows: (start, end); None: the maker is a norm.
        has_bias: whether the maker has one.
        classes: [K] int64, the row (from ``start``) that makes each channel, where several channels are of
            one row (quant/folding.py); None: each has its own.
    """

    reader: str
    maker: str
    rows: tuple[int, int] | None
    has_bias: bool
    classes: torch.Tensor | None = None


def rescaling_sites(config: DecoderConfig, index: int) -> list[RescalingSite]:
    """Those of layer ``index``, in the order of its products."""
    name = f"layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    norm_bias, gated = config.norm == "layer_norm", config.gated
    first = f"{mlp}.gate_up_proj" if gated else f"{mlp}.up_proj"
    shared = config.num_heads != config.num_kv_heads
    values = value_rows(config.num_heads, config.num_kv_heads, config.head_dim) if shared else None
    value_start, inner = config.q_size + config.kv_size, config.intermediate_size
    value_range = (value_start, value_start + config.kv_size)
    found = [
        RescalingSite(f"{attention}.qkv_proj", f"{name}.input_layernorm", None, norm_bias),
        RescalingSite(f"{attention}.o_proj", f"{attention}.qkv_proj", value_range, config.qkv_bias, values),
        RescalingSite(first, f"{name}.post_attention_layernorm", None, norm_bias),
    ]
    if gated or config.mlp == "relu":
        made = (inner, 2 * inner) if gated else (0, inner)
        found.append(RescalingSite(f"{mlp}.down_proj", first, made, config.mlp_bias))
    return found


def fold(site: RescalingSite, scales: torch.Tensor, weights: Weights) -> None:
    """Divide the site's channels by ``scales`` [K] where they are made, and multiply where they are read.

    What is replaced is fp32. Scales are equal within a class.

    Raises:
        ConfigError: there is another number of scales, or one is not positive and finite.
    """
    reader = f"{site.reader}.weight"
    weights.replace(reader, fold_into_columns(weights.weight(reader), scales))
    names = [f"{site.maker}.{kind}" for kind in (("weight", "bias") if site.has_bias else ("weight",))]
    found = [weights.weight(name) for name in names]
    bias = found[1] if site.has_bias else None
    if site.rows is None:
        changed = fold_into_norm(found[0], scales, bias)
    else:
        start, end = site.rows
        factors = torch.ones(found[0].shape[0], dtype=scales.dtype, device=scales.device)
        factors[start:end] = scales if site.classes is None else one_a_class(scales, site.classes)
        changed = fold_into_rows(found[0], bias, factors)
    for name, tensor in zip(names, changed, strict=False):
        assert tensor is not None, name
        weights.replace(name, tensor)
