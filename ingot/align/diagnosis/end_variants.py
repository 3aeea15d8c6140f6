"""What ports get wrong at a model's ends.

Owns the variants of the head and of the embedding. Knows nothing of layers.

    for variant in head_variants(head, embedding, config): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ingot.align.diagnosis.spec import EmbeddingSpec, HeadSpec
from ingot.align.diagnosis.variant import Claim, Variant, bias_variants, mirrored, transposed_variants
from ingot.config.model import DecoderConfig


def head_variants(
    spec: HeadSpec, embedding: torch.Tensor, config: DecoderConfig
) -> Iterator[Variant[HeadSpec]]:
    """Tied or untied, scaled, biased, transposed."""
    yield Variant(
        replace(spec, weight=embedding),
        "the embedding as the head's weight",
        Claim("head_untied", "the head has its own weight, the original's is tied to the embedding"),
        Claim("head_tied", "the head runs on the embedding's weight instead of its own"),
    )
    size = config.hidden_size
    for scale, text in (
        (size**-0.5, "1/sqrt(hidden size)"),
        (1 / size, "1/hidden size"),
        (size**0.5, "sqrt(hidden size)"),
    ):
        yield logit_scale_variant(spec, scale, f"{scale:.5g}, {text}")
    yield from bias_variants(spec, ("bias",), "head_bias", f"{spec.name}.bias")
    yield from transposed_variants(spec, "weight", f"{spec.name}.weight")
    for shift in (1, -1):
        yield mirrored(
            replace(spec, weight=spec.weight.roll(shift, 0)),
            f"the rows of {spec.name}.weight shifted by {shift:+d}",
            "vocabulary_order",
            "the vocabulary's rows are off by one",
        )


def logit_scale_variant(spec: HeadSpec, scale: float, text: str) -> Variant[HeadSpec]:
    """Logits times a factor."""
    return Variant(
        replace(spec, scale=scale),
        f"logits times {text}",
        Claim("logit_scale", f"logits lack the original's factor {text}"),
        Claim("logit_scale", f"logits have an extra factor {text}"),
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
        Claim("embedding_scale", f"token embeddings have an extra factor {scale:.5g}"),
    )
