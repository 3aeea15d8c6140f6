"""Where the channels of a layer can be rescaled without a change of its outputs, and the folding of factors.

Some inputs have no site: that of a down product behind a GELU, which is not linear; those of the head and of
cross-attention's keys and values, whose norms are of no layer; those behind a norm whose output is also what
branches are added to (post-norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import StackConfig
from ingot.config.half_dtypes import in_encoder
from ingot.models.model_registry import plain_encoder
from ingot.quant.methods.channel_folding import (
    fold_into_columns,
    fold_into_norm,
    fold_into_rows,
    one_a_class,
    value_rows,
)


class LayerWeights(Protocol):
    """A layer's parameters, which can be replaced (calibrate.py: ``CalibratedLayer``)."""

    def weight(self, name: str) -> torch.Tensor: ...

    def replace(self, name: str, tensor: torch.Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class RescalingSite:
    """The input of one linear layer and what makes it.

    Attributes:
        reader: the linear layer's name in the model.
        maker: of a norm, or of the linear layer whose ``rows`` make the channels.
        rows: (start, end); None: the maker is a norm.
        has_bias: whether the maker has one.
        classes: [K] int64, the row (from ``start``) that makes each channel, where several channels are of
            one row (quant/methods/channel_folding.py); None: each has its own.
    """

    reader: str
    maker: str
    rows: tuple[int, int] | None
    has_bias: bool
    classes: torch.Tensor | None = None


@dataclass(frozen=True)
class ValueRows:
    """The rows of a product that make an attention's values.

    Attributes:
        maker: the product's name in the model.
        start: of the values, behind queries and keys.
        num_heads, num_kv_heads, head_dim: heads of queries and of values, and their size.
        has_bias: whether the product has one.
    """

    maker: str
    start: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool

    @property
    def site(self) -> RescalingSite:
        """The input of the attention's output product."""
        heads = self.num_heads, self.num_kv_heads
        classes = value_rows(*heads, self.head_dim) if heads[0] != heads[1] else None
        rows = (self.start, self.start + self.num_kv_heads * self.head_dim)
        reader = f"{self.maker.rpartition('.')[0]}.o_proj"
        return RescalingSite(reader, self.maker, rows, self.has_bias, classes)


def layer_shape(config: DecoderConfig, layer: str) -> DecoderConfig | StackConfig:
    """The config that a layer is of: the decoder's, or its encoder's."""
    if not in_encoder(layer):
        return config
    encoder = plain_encoder(config)
    found = None if encoder is None else encoder.shape_of(layer)
    assert found is not None, layer
    return found.stack


def value_rows_of(config: DecoderConfig, attention: str) -> ValueRows:
    """Of an attention by its name, ``layers.0.self_attn``."""
    shape = layer_shape(config, attention)
    cross = attention.endswith(".encoder_attn")
    if isinstance(shape, StackConfig):
        heads, size = shape.num_heads, shape.hidden_size
        maker, start = ("kv_proj", size) if cross else ("qkv_proj", 2 * size)
        return ValueRows(f"{attention}.{maker}", start, heads, heads, size // heads, has_bias=True)
    start = shape.kv_size if cross else shape.q_size + shape.kv_size
    maker = f"{attention}.{'kv_proj' if cross else 'qkv_proj'}"
    return ValueRows(
        maker, start, shape.num_heads, shape.num_kv_heads, shape.head_dim, has_bias=shape.qkv_bias
    )


def rescaling_sites(config: DecoderConfig, layer: str) -> list[RescalingSite]:
    """The sites of a layer by its name (``layers.0``, ``encoder.layers.0``), in the order of its products."""
    encoder = plain_encoder(config) if in_encoder(layer) else None
    own = None if encoder is None else encoder.shape_of(layer)
    if encoder is not None and (own is None or own.post_norm):
        found = [] if own is None else ["self_attn", *(["encoder_attn"] if own.crosses else [])]
        return [value_rows_of(config, f"{layer}.{attention}").site for attention in found]
    shape = layer_shape(config, layer)
    norm_bias = shape.norm == "layer_norm" if isinstance(shape, DecoderConfig) else True
    gated = isinstance(shape, DecoderConfig) and shape.gated
    attention, cross, mlp = f"{layer}.self_attn", f"{layer}.encoder_attn", f"{layer}.mlp"
    first = f"{mlp}.gate_up_proj" if gated else f"{mlp}.up_proj"
    sites = [
        RescalingSite(f"{attention}.qkv_proj", f"{layer}.input_layernorm", None, norm_bias),
        value_rows_of(config, attention).site,
    ]
    if shape is config and config.crosses:
        sites.append(RescalingSite(f"{cross}.q_proj", f"{cross}_layernorm", None, norm_bias))
        sites.append(value_rows_of(config, cross).site)
    sites.append(RescalingSite(first, f"{layer}.post_attention_layernorm", None, norm_bias))
    if gated or shape.activation == "relu":
        inner = shape.intermediate_size
        made = (inner, 2 * inner) if gated else (0, inner)
        sites.append(RescalingSite(f"{mlp}.down_proj", first, made, shape.mlp_bias))
    return sites


def fold(site: RescalingSite, scales: torch.Tensor, weights: LayerWeights) -> None:
    """Divide the site's channels by ``scales`` [K] where they are made, and multiply where they are read.

    What is replaced is fp32. Scales are equal within a class.
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
