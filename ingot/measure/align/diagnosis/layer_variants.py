"""What ports get wrong about a layer's sums and the place of its norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ingot.config.decoder_config import DecoderConfig
from ingot.measure.align.diagnosis.attention_variants import attention_variants
from ingot.measure.align.diagnosis.module_variants import mlp_variants, norm_variants
from ingot.measure.align.diagnosis.stage_spec import LayerSpec, SumSpec
from ingot.measure.align.diagnosis.variant import Claim, Variant

BRANCHES = {"attention": "attention's", "mlp": "the MLP's"}


def layer_variants(
    spec: LayerSpec, config: DecoderConfig, new_tokens: int, number: int
) -> Iterator[Variant[LayerSpec]]:
    """The layer's own variants, then those of its parts."""
    yield from _residuals(spec, config, number)
    texts = {
        "post": "norms after the sums (post-norm)",
        "parallel": "attention and MLP side by side on the layer's input",
        "normed_residual": "residuals taken after the norms",
    }
    for placement, text in texts.items():
        yield Variant(
            replace(spec, placement=placement),  # type: ignore[arg-type]
            text,
            Claim(
                "norm_placement", f"{spec.name} has its norms before its branches; the original has {text}"
            ),
            Claim("norm_placement", f"{spec.name} runs with {text}, not with norms before its branches"),
        )
    parts: dict[str, Iterator[Variant[Any]]] = {
        "attention": attention_variants(spec.attention, config, new_tokens, number),
        "mlp": mlp_variants(spec.mlp),
        "input_norm": norm_variants(spec.input_norm),
        "post_norm": norm_variants(spec.post_norm),
    }
    for field, variants in parts.items():
        for variant in variants:
            yield replace(variant, spec=replace(spec, **{field: variant.spec}))
    both = zip(norm_variants(spec.input_norm), norm_variants(spec.post_norm), strict=False)
    for first, second in both:
        changed = replace(spec, input_norm=first.spec, post_norm=second.spec)
        change = f"{first.change}, and the same in the second norm"
        yield Variant(changed, change, first.of_original, first.of_engine)


def sum_variants(spec: SumSpec) -> Iterator[Variant[SumSpec]]:
    """One of the two addends missing or scaled."""
    what, place = BRANCHES[spec.of], f"the sum after {BRANCHES[spec.of]} branch of {spec.name}"
    yield Variant(
        replace(spec, residual=0.0),
        f"{what} output alone",
        Claim("residual_extra", f"{place} has a residual that the original does not add"),
        Claim("residual_missing", f"{place} lacks its residual"),
    )
    yield Variant(
        replace(spec, branch=0.0),
        "the residual alone",
        Claim(
            "branch_extra", f"{what} output is added to the residual of {spec.name}, but not in the original"
        ),
        Claim(
            "branch_missing", f"{what} output is not added to the residual of {spec.name}, or is added later"
        ),
    )
    for scale in (0.5, 2.0, math.sqrt(0.5), math.sqrt(2.0)):
        yield sum_variant(spec, 1.0, scale)
        yield sum_variant(spec, scale, 1.0)


def sum_variant(spec: SumSpec, residual: float, branch: float) -> Variant[SumSpec]:
    text = f"{residual:.4g} · residual + {branch:.4g} · {BRANCHES[spec.of]} output"
    claim = Claim("residual_scale", f"the residual sum of {spec.name} has wrong factors")
    return Variant(replace(spec, residual=residual, branch=branch), text, claim, claim)


def _residuals(spec: LayerSpec, config: DecoderConfig, number: int) -> Iterator[Variant[LayerSpec]]:
    depth = 2 * config.num_layers
    usual = (math.sqrt(0.5), math.sqrt(2.0), 1 / math.sqrt(depth), depth**0.25, 1 / (number + 1))
    scales = (0.5, 2.0, *usual)
    for where in ("attention", "mlp"):
        sum_ = f"the sum after {BRANCHES[where]} branch of {spec.name}"
        yield Variant(
            replace(spec, **{f"{where}_residual": 0.0}),  # type: ignore[arg-type]
            f"{BRANCHES[where]} output alone instead of {sum_}",
            Claim("residual_extra", f"{sum_} has a residual that the original does not add"),
            Claim("residual_missing", f"{sum_} lacks its residual"),
        )
        for scale in (*scales, 0.0):
            yield _scaled(spec, where, "branch", scale)
        for scale in (2.0, 0.5, *usual):
            yield _scaled(spec, where, "residual", scale)
    for scale in scales:
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
    """Both branches scaled, as by Granite's residual multiplier and MiniCPM's depth scale."""
    text = f"both branches scaled by {scale:.5g} in their sums"
    return Variant(
        replace(spec, attention_branch=scale, mlp_branch=scale),
        text,
        Claim("residual_scale", f"the residual sums lack the original's factor ({text})"),
        Claim("residual_scale", f"the residual sums have a wrong factor ({text})"),
    )
