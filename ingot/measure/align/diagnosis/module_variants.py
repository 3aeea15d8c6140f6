"""What ports get wrong about norms, the feed-forward, the head and the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.measure.align.diagnosis.stage_spec import EmbeddingSpec, HeadSpec, MlpSpec
from ingot.measure.align.diagnosis.variant import Claim, Variant, bias_variants, mirrored, transposed_variants
from ingot.reference.plain_layer import Activation, NormSpec

EPSILONS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-7, 1e-10, 0.0, 1e-4, 1e-3, 1e-2)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "none")


def norm_variants(spec: NormSpec) -> Iterator[Variant[NormSpec]]:
    """Other epsilons, the other kind, weights with and without one, no norm at all, biases."""
    for eps in EPSILONS:
        if eps != spec.eps:
            yield eps_variant(spec, eps)
    names = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}
    other = "layer_norm" if spec.kind == "rms_norm" else "rms_norm"
    here = names[spec.kind]
    for bias in {id(b): b for b in (spec.bias, None)}.values():
        yield Variant(
            replace(spec, kind=other, bias=bias),  # type: ignore[arg-type]
            f"{names[other]} in its place",
            Claim("norm_kind", f"{spec.name} is {here}, the original's is {names[other]}"),
            Claim("norm_kind", f"{spec.name} runs as {names[other]}, the config says {here}"),
        )
    yield Variant(
        replace(spec, kind="none"),
        f"{spec.name} left out",
        Claim("norm_placement", f"{spec.name} stands where the original has no norm"),
        Claim("norm_placement", f"{spec.name} is not applied"),
    )
    yield from _norm_weights(spec)
    yield from bias_variants(spec, ("bias",), "norm_bias", f"{spec.name}.bias")


def eps_variant(spec: NormSpec, eps: float) -> Variant[NormSpec]:
    return Variant(
        replace(spec, eps=eps),
        f"epsilon {eps:g}",
        Claim("norm_eps", f"the epsilon of {spec.name} is {spec.eps:g}, the original's is {eps:g}"),
        Claim("norm_eps", f"{spec.name} runs with epsilon {eps:g}, the config says {spec.eps:g}"),
    )


def _norm_weights(spec: NormSpec) -> Iterator[Variant[NormSpec]]:
    texts = {1.0: ("weight + 1", "lacks the +1"), -1.0: ("weight - 1", "has an extra +1")}
    for offset, (formula, lacking) in texts.items():
        having = texts[-offset][1]
        yield Variant(
            replace(spec, offset=spec.offset + offset),
            f"{formula} as the factor",
            Claim("norm_offset", f"the weight of {spec.name} {lacking} that the original adds"
                  if offset > 0 else f"the weight of {spec.name} {lacking}"),
            Claim("norm_offset", f"the weight of {spec.name} {having}"),
        )  # fmt: skip
    yield Variant(
        replace(spec, weight=torch.ones_like(spec.weight)),
        "ones for its weight",
        Claim("norm_weight", f"{spec.name} has a weight, the original's is all ones"),
        Claim("norm_weight", f"the weight of {spec.name} is not applied"),
    )


def mlp_variants(spec: MlpSpec) -> Iterator[Variant[MlpSpec]]:
    """Branches exchanged, other activations, biases, transposed weights."""
    if spec.gate is not None:
        yield from _branches(spec)
    for activation in ACTIVATIONS:
        if activation == spec.activation:
            continue
        text = "no activation" if activation == "none" else activation
        yield Variant(
            replace(spec, activation=activation),
            text,
            Claim(
                "activation", f"the activation of {spec.name} is {spec.activation}, the original has {text}"
            ),
            Claim("activation", f"{spec.name} runs with {text}, the config says {spec.activation}"),
        )
    yield from bias_variants(spec, ("down_bias",), "mlp_bias", f"{spec.name}.down_proj.bias")
    names = {"down": f"{spec.name}.down_proj.weight", "up": f"{spec.name}.up_proj.weight"}
    if spec.gate is None:
        yield from bias_variants(spec, ("up_bias",), "mlp_bias", f"{spec.name}.up_proj.bias")
    else:
        bias, weight = f"{spec.name}.gate_up_proj.bias", f"{spec.name}.gate_up_proj.weight"
        yield from bias_variants(spec, ("gate_bias", "up_bias"), "mlp_bias", bias)
        yield from bias_variants(spec, ("gate_bias",), "mlp_bias", bias, part="gate")
        yield from bias_variants(spec, ("up_bias",), "mlp_bias", bias, part="up")
        names |= {"up": f"the up half of {weight}", "gate": f"the gate half of {weight}"}
    for field, name in names.items():
        yield from transposed_variants(spec, field, name)


def _branches(spec: MlpSpec) -> Iterator[Variant[MlpSpec]]:
    assert spec.gate is not None
    swapped = replace(spec, gate=spec.up, up=spec.gate, gate_bias=spec.up_bias, up_bias=spec.gate_bias)
    halves = f"the halves of {spec.name}.gate_up_proj"
    yield Variant(
        swapped,
        f"{halves} exchanged",
        Claim("gate_up_swapped", f"gate and up of {spec.name} are swapped"),
        Claim("activation_branch", f"the activation of {spec.name} is on the wrong branch (up, not gate)"),
    )
    for on, text in (("both", "on both branches"), ("product", "on the product of both branches")):
        yield mirrored(
            replace(spec, on=on),  # type: ignore[arg-type]
            f"the activation {text}",
            "activation_branch",
            f"the activation of {spec.name} is on the wrong branch ({text})",
        )
    rows, weight = spec.gate.shape[0] * 2, torch.cat([spec.gate, spec.up])
    turns = replace(spec, gate=weight[0::2], up=weight[1::2])
    if spec.gate_bias is not None and spec.up_bias is not None:
        bias = torch.cat([spec.gate_bias, spec.up_bias])
        turns = replace(turns, gate_bias=bias[0::2], up_bias=bias[1::2])
    yield mirrored(
        turns,
        f"the rows of {spec.name}.gate_up_proj taken as gate and up in turn, {rows} in all",
        "gate_up_interleaved",
        f"gate and up of {spec.name} are interleaved, row by row",
    )


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
    return Variant(
        replace(spec, scale=scale),
        f"token embeddings times {scale:.5g}",
        Claim("embedding_scale", f"token embeddings lack the original's factor {scale:.5g}"),
        Claim("embedding_scale", f"token embeddings have an extra factor {scale:.5g}"),
    )
