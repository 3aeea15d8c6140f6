"""What ports get wrong about norms.

Owns the variants of one NormSpec. Knows nothing of where norms stand in a layer.

    for variant in norm_variants(norm): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ingot.align.diagnosis.variant import Claim, Variant, bias_variants
from ingot.layers.checking import NormSpec

EPSILONS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-7, 1e-10, 0.0, 1e-4, 1e-3, 1e-2)


def norm_variants(spec: NormSpec) -> Iterator[Variant[NormSpec]]:
    """Other epsilons, the other kind, weights with and without one, no norm at all, biases."""
    for eps in EPSILONS:
        if eps != spec.eps:
            yield eps_variant(spec, eps)
    yield from _kinds(spec)
    yield from _weights(spec)
    yield from bias_variants(spec, ("bias",), "norm_bias", f"{spec.name}.bias")


def eps_variant(spec: NormSpec, eps: float) -> Variant[NormSpec]:
    """Another epsilon."""
    return Variant(
        replace(spec, eps=eps),
        f"epsilon {eps:g}",
        Claim("norm_eps", f"the epsilon of {spec.name} is {spec.eps:g}, the original's is {eps:g}"),
        Claim("norm_eps", f"{spec.name} runs with epsilon {eps:g}, the config says {spec.eps:g}"),
    )


def _kinds(spec: NormSpec) -> Iterator[Variant[NormSpec]]:
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


def _weights(spec: NormSpec) -> Iterator[Variant[NormSpec]]:
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
