"""What ports get wrong about a layer's sums, and about the ends of a model.

Owns the variants of residuals and norm placement, of the head and of the embedding; a layer has its parts'
variants too. Knows nothing of searching.

    for variant in layer_variants(layer, config, new_tokens=8, number=3): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ingot.align.culprits.attention_variants import attention_variants
from ingot.align.culprits.mlp_variants import mlp_variants
from ingot.align.culprits.norm_variants import norm_variants
from ingot.align.culprits.spec import EmbeddingSpec, HeadSpec, LayerSpec
from ingot.align.culprits.variant import Claim, Variant, bias_variants, mirrored, transposed_variants
from ingot.config.model import DecoderConfig

BRANCHES = {"attention": "attention's", "mlp": "the MLP's"}


def layer_variants(
    spec: LayerSpec, config: DecoderConfig, new_tokens: int, number: int
) -> Iterator[Variant[LayerSpec]]:
    """The layer's own variants, then those of its parts."""
    yield from _residuals(spec, config, number)
    yield from _placements(spec)
    parts: dict[str, Iterator[Variant[Any]]] = {
        "attention": attention_variants(spec.attention, config, new_tokens, number),
        "mlp": mlp_variants(spec.mlp),
        "input_norm": norm_variants(spec.input_norm),
        "post_norm": norm_variants(spec.post_norm),
    }
    for field, variants in parts.items():
        for variant in variants:
            changed = replace(spec, **{field: variant.spec})
            yield Variant(changed, variant.change, variant.of_original, variant.of_engine)
    both = zip(norm_variants(spec.input_norm), norm_variants(spec.post_norm), strict=False)
    for first, second in both:
        changed = replace(spec, input_norm=first.spec, post_norm=second.spec)
        yield Variant(
            changed, f"{first.change}, and so in the second norm", first.of_original, first.of_engine
        )


def _residuals(spec: LayerSpec, config: DecoderConfig, number: int) -> Iterator[Variant[LayerSpec]]:
    depth = 2 * config.num_layers
    scales = (
        0.5,
        2.0,
        math.sqrt(0.5),
        math.sqrt(2.0),
        1 / math.sqrt(depth),
        depth**0.25,
        1 / (number + 1),
        0.0,
    )
    for where in ("attention", "mlp"):
        sum_ = f"the sum after {BRANCHES[where]} branch of {spec.attention.name.removesuffix('.self_attn')}"
        yield Variant(
            replace(spec, **{f"{where}_residual": 0.0}),  # type: ignore[arg-type]
            f"{BRANCHES[where]} output alone instead of {sum_}",
            Claim("residual_extra", f"{sum_} has a residual that the original does not add"),
            Claim("residual_missing", f"{sum_} lacks its residual"),
        )
        for scale in scales:
            yield _scaled(spec, where, "branch", scale)
        for scale in (2.0, 0.5, *scales[2:-1]):
            yield _scaled(spec, where, "residual", scale)
    for scale in scales[:-1]:
        yield branch_variant(spec, scale)


def _scaled(spec: LayerSpec, where: str, which: str, scale: float) -> Variant[LayerSpec]:
    what = "output" if which == "branch" else "residual"
    text = f"{BRANCHES[where]} {what} scaled by {scale:.4g} in the sum"
    return Variant(
        replace(spec, **{f"{where}_{which}": scale}),  # type: ignore[arg-type]
        text,
        Claim("residual_scale", f"the residual sum lacks the original's factor ({text})"),
        Claim("residual_scale", f"the residual sum has a wrong factor ({text})"),
    )


def branch_variant(spec: LayerSpec, scale: float) -> Variant[LayerSpec]:
    """Both branches scaled alike, as Granite's residual multiplier and MiniCPM's depth scale do."""
    text = f"both branches scaled by {scale:.5g} in their sums"
    return Variant(
        replace(spec, attention_branch=scale, mlp_branch=scale),
        text,
        Claim("residual_scale", f"the residual sums lack the original's factor ({text})"),
        Claim("residual_scale", f"the residual sums have a wrong factor ({text})"),
    )


def _placements(spec: LayerSpec) -> Iterator[Variant[LayerSpec]]:
    name = spec.attention.name.removesuffix(".self_attn")
    texts = {
        "post": "norms after the sums (post-norm)",
        "parallel": "attention and MLP side by side on the layer's input",
        "normed_residual": "residuals taken after the norms",
    }
    for placement, text in texts.items():
        yield Variant(
            replace(spec, placement=placement),  # type: ignore[arg-type]
            text,
            Claim("norm_placement", f"{name} has its norms before its branches; the original has {text}"),
            Claim("norm_placement", f"{name} runs with {text}, not with norms before its branches"),
        )


def head_variants(
    spec: HeadSpec, embedding: torch.Tensor, config: DecoderConfig
) -> Iterator[Variant[HeadSpec]]:
    """Tied or untied, scaled, biased, transposed."""
    yield Variant(
        replace(spec, weight=embedding),
        "the embedding as the head's weight",
        Claim("head_untied", "the head has a weight of its own, the original's is the embedding's"),
        Claim("head_tied", "the head runs on the embedding's weight instead of its own"),
    )
    size = config.hidden_size
    for scale, text in (
        (size**-0.5, "1/sqrt(hidden size)"),
        (1 / size, "1/hidden size"),
        (size**0.5, "sqrt"),
    ):
        yield logit_scale_variant(spec, scale, f"{scale:.5g}, {text}")
    yield from bias_variants(spec, ("bias",), "head_bias", f"{spec.name}.bias")
    yield from transposed_variants(spec, "weight", f"{spec.name}.weight")
    for shift in (1, -1):
        yield mirrored(
            replace(spec, weight=spec.weight.roll(shift, 0)),
            f"the rows of {spec.name}.weight moved by {shift:+d}",
            "vocabulary_order",
            "the vocabulary's rows are off by one",
        )


def logit_scale_variant(spec: HeadSpec, scale: float, text: str) -> Variant[HeadSpec]:
    """Logits times a factor."""
    return Variant(
        replace(spec, scale=scale),
        f"logits times {text}",
        Claim("logit_scale", f"logits lack the original's factor {text}"),
        Claim("logit_scale", f"logits have a factor {text} that they should not have"),
    )


def embedding_variants(spec: EmbeddingSpec) -> Iterator[Variant[EmbeddingSpec]]:
    """Learned positions missing or shifted, rows scaled."""
    for scale in (math.sqrt(spec.tokens.shape[1]), 1 / math.sqrt(spec.tokens.shape[1])):
        yield embedding_scale_variant(spec, scale)
    if spec.places is None:
        return
    yield Variant(
        replace(spec, places=None),
        "no learned positions",
        Claim("positions_extra", "learned positions are added where the original has none"),
        Claim("positions_missing", "learned positions are not added"),
    )
    for shift in (1, -1, 2, -2):
        yield mirrored(
            replace(spec, shift=shift),
            f"learned positions {shift:+d}",
            "positions_shifted",
            f"learned positions are off by {abs(shift)}",
        )


def embedding_scale_variant(spec: EmbeddingSpec, scale: float) -> Variant[EmbeddingSpec]:
    """Token rows times a factor."""
    return Variant(
        replace(spec, scale=scale),
        f"token embeddings times {scale:.5g}",
        Claim("embedding_scale", f"token embeddings lack the original's factor {scale:.5g}"),
        Claim("embedding_scale", f"token embeddings have a factor {scale:.5g} that they should not have"),
    )
