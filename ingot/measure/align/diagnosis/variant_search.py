"""Which variant explains a divergence.

Owns the order of the search and what counts as an explanation. Knows no variant's inside.

    findings = explain(divergence, model, config)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.layers.decoder import Decoder
from ingot.measure.align.diagnosis.attention_variants import attention_variants, scale_variant
from ingot.measure.align.diagnosis.id_differences import STAGES, explain_ids
from ingot.measure.align.diagnosis.layer_variants import (
    branch_variant,
    layer_variants,
    sum_variant,
    sum_variants,
)
from ingot.measure.align.diagnosis.module_variants import (
    embedding_scale_variant,
    embedding_variants,
    eps_variant,
    head_variants,
    logit_scale_variant,
    mlp_variants,
    norm_variants,
)
from ingot.measure.align.diagnosis.rope_variants import base_variant
from ingot.measure.align.diagnosis.stage_reader import read_stage
from ingot.measure.align.diagnosis.stage_spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    Products,
    Spec,
    SumSpec,
    matrices,
    run,
)
from ingot.measure.align.diagnosis.variant import Variant
from ingot.measure.align.diagnosis.variant_fit import HELD_OUT, best_number, solved_biases, solved_factors
from ingot.measure.align.first_divergence import Divergence, Finding
from ingot.reference.plain_layer import NormSpec

FLOORS = 4.0  # a variant this many floors from the target has reached it,
LEAST_CUT = 3.0  # if the difference was at least so many times as large;
CUT = 10.0  # elsewhere it has to leave no more than this part of it
LEAST_FLOOR = 1e-6  # of fp32 sums in another order
ALIKE = 3.0  # findings this close to the best one are ordered by how likely they are


@torch.no_grad()
def explain(divergence: Divergence, model: Decoder, config: DecoderConfig) -> list[Finding]:
    """Why a stage's output is not the reference's; best first, empty where no variant explains it.

    The stage runs again in fp32 on the reference's inputs, from the engine's weights and as its config says,
    with one thing changed at a time. If it gives what the reference gave when nothing is changed, the
    engine's code is wrong, and the variant that gives the engine's output says how (``before`` and ``after``
    are distances to that output then). Otherwise its weights or its config are wrong, and the variant that
    gives the reference's output says how.

    A finding comes within 4 floors, or leaves a tenth of the difference; one that comes within the floors
    drops those that do not. Attention and whole layers need the inputs from position 0 on. A bias that the
    engine lost is solved from three quarters of the tokens and judged by the others.
    """
    if divergence.stage in STAGES:
        return explain_ids(divergence)
    bench = _Bench.of(divergence, model, config)
    if bench is None or bench.before <= max(divergence.floor, LEAST_FLOOR):
        return []
    for variants in (_listed(bench), _searched(bench)):
        findings = _rank(bench, variants)
        if findings:
            return findings
    if bench.code:
        return []
    return _rank(bench.held_out(), solved_biases(bench.spec, bench.inputs, bench.target))


def explain_first(
    divergences: Iterable[Divergence], model: Decoder, config: DecoderConfig
) -> tuple[Divergence, list[Finding]] | None:
    """The divergence that explains itself, of those in the first one's layer and step.

    Pass what diverges in the order in which it runs, the whole layer (``layers.3``) with it. A norm in the
    wrong place shows in a sum first, and only the whole layer tells it from a missing addend: modules are
    asked first, then the layer, then the sums.
    """
    first: list[Divergence] = []
    for divergence in divergences:
        if first and (divergence.layer, divergence.step) != (first[0].layer, first[0].step):
            break
        first.append(divergence)
    for divergence in sorted(first, key=_turn):
        findings = explain(divergence, model, config)
        if findings:
            return divergence, findings
    return None


def _turn(divergence: Divergence) -> int:
    if divergence.stage.endswith((".residual", ".output")):
        return 2
    return 1 if divergence.stage == f"layers.{divergence.layer}" else 0


@dataclass(frozen=True)
class _Bench:
    divergence: Divergence
    spec: Spec
    inputs: torch.Tensor
    target: torch.Tensor
    before: float
    reach: float
    code: bool
    embedding: torch.Tensor
    config: DecoderConfig
    products: Products
    rows: slice | None = None

    @classmethod
    def of(cls, divergence: Divergence, model: Decoder, config: DecoderConfig) -> _Bench | None:
        device = model.embed_tokens.weight.device
        spec = read_stage(divergence, model, config)
        inputs = divergence.inputs.to(device)
        embeds = isinstance(spec, EmbeddingSpec)
        if spec is None or embeds != (inputs.dim() == 1):
            return None
        inputs = inputs.long() if embeds else inputs.float()
        expected, got = divergence.expected.to(device).float(), divergence.got.to(device).float()
        if expected.shape != got.shape:
            return None
        reach = FLOORS * max(divergence.floor, LEAST_FLOOR)
        products = Products(matrices(spec))
        unchanged = run(spec, inputs, products)[-expected.shape[0] :]
        honest = distance(unchanged, expected)
        code = honest <= reach and honest < distance(unchanged, got)
        target, other = (got, unchanged) if code else (expected, got)
        weight = model.embed_tokens.weight.float()
        before = distance(other, target)
        return cls(divergence, spec, inputs, target, before, reach, code, weight, config, products)

    def held_out(self) -> _Bench:
        """The same, judged by the tokens that ``solved_biases`` does not see."""
        unchanged = replace(self, rows=HELD_OUT)
        return replace(unchanged, before=unchanged.error(self.spec))

    def error(self, spec: Spec) -> float:
        """Relative L2 of a spec's output to the target."""
        output = run(spec, self.inputs, self.products)[-self.target.shape[0] :]
        rows = slice(None) if self.rows is None else self.rows
        return distance(output[rows], self.target[rows])


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||theirs||; infinite where there is a NaN or the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    value = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return value if value == value else float("inf")


def _rank(bench: _Bench, variants: Iterable[Variant[Any]]) -> list[Finding]:
    """Those that reach the target, else those that come near; of equals the likelier, which came first."""
    exact: dict[str, Finding] = {}
    partial: dict[str, Finding] = {}
    for variant in variants:
        after = bench.error(variant.spec)
        finding = _finding(bench, variant, after)
        if after <= bench.reach and after * LEAST_CUT <= bench.before:
            exact.setdefault(finding.text, finding)
        elif after * CUT <= bench.before:
            partial.setdefault(finding.text, finding)
    found = list((exact or partial).values())
    alike = max(ALIKE * min((f.after for f in found), default=0.0), LEAST_FLOOR)
    return sorted(found, key=lambda finding: 0.0 if finding.after <= alike else finding.after)


def _finding(bench: _Bench, variant: Variant[Any], after: float) -> Finding:
    claim = variant.of_engine if bench.code else variant.of_original
    figures = f"the difference falls from {bench.before:.2g} to {after:.2g}"
    evidence = f"with {variant.change} {figures}"
    if bench.code:
        evidence = f"its weights and config give the original's output; with {variant.change} they give the "
        evidence += f"engine's ({figures})"
    return Finding(claim.culprit, bench.before, after, f"{claim.text}: {evidence}")


def _listed(bench: _Bench) -> Iterator[Variant[Any]]:
    tokens, number = bench.target.shape[0], bench.divergence.layer or 0
    match bench.spec:
        case AttentionSpec():
            yield from attention_variants(bench.spec, bench.config, tokens, number)
        case MlpSpec():
            yield from mlp_variants(bench.spec)
        case NormSpec():
            yield from norm_variants(bench.spec)
        case SumSpec():
            yield from sum_variants(bench.spec)
        case LayerSpec():
            yield from layer_variants(bench.spec, bench.config, tokens, number)
        case HeadSpec():
            yield from head_variants(bench.spec, bench.embedding, bench.config)
        case EmbeddingSpec():
            yield from embedding_variants(bench.spec)


def _searched(bench: _Bench) -> Iterator[Variant[Any]]:
    for make, low, high in _numbers(bench):
        yield best_number(make, low, high, bench.error)
    if isinstance(bench.spec, SumSpec):
        yield sum_variant(bench.spec, *solved_factors(bench.spec, bench.inputs, bench.target))


Numbers = Iterator[tuple[Callable[[float], Variant[Any]], float, float]]


def _numbers(bench: _Bench) -> Numbers:
    spec, rope = bench.spec, bench.config.rope
    match spec:
        case AttentionSpec():
            if spec.rope is not None and rope is not None:
                turning = spec.rope
                yield (lambda base: base_variant(spec, turning, rope, base)), 1e2, 1e9
            yield (lambda s: scale_variant(spec, s, f"{s:.5g}", f"{s:.5g}")), 1e-4, 1e2
        case NormSpec():
            yield (lambda eps: eps_variant(spec, eps)), 1e-13, 1.0
        case LayerSpec():
            yield (lambda scale: branch_variant(spec, scale)), 1e-3, 1e2
        case HeadSpec():
            yield (lambda s: logit_scale_variant(spec, s, f"{s:.5g}")), 1e-4, 1e4
        case EmbeddingSpec():
            yield (lambda scale: embedding_scale_variant(spec, scale)), 1e-4, 1e4
