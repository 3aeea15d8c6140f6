"""Which variant explains a divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
from ingot.measure.align.diagnosis.variant import Claim, SpecT, Variant
from ingot.measure.align.first_divergence import Divergence, Finding
from ingot.reference.plain_layer import NormSpec

FLOORS = 4.0  # a variant within this many floors has reached the target,
LEAST_CUT = 3.0  # if the difference was at least this many times as large;
CUT = 10.0  # otherwise it must divide the difference by this
LEAST_FLOOR = 1e-6  # of fp32 sums in another order
ALIKE = 3.0  # findings this close to the best one are ordered by likelihood
GRID, NARROWINGS = 33, 45
GOLDEN = (math.sqrt(5.0) - 1) / 2
FIT_STEPS, FIT_ROUNDS = 20, 8
HOPEFUL = 0.25  # a fit goes on if its first round leaves at most this part of the squares
FEWEST_TOKENS = 4
HELD_OUT = slice(3, None, 4)  # tokens that judge a solved bias
_WEIGHTS = {
    "output_bias": "output",
    "qkv_bias": "qkv",
    "down_bias": "down",
    "up_bias": "up",
    "gate_bias": "gate",
    "bias": "weight",
}
_LAST = ("output_bias", "down_bias", "bias")  # added last: the mean of the error

Error = Callable[[Any], float]


@torch.no_grad()
def explain(divergence: Divergence, model: Decoder, config: DecoderConfig) -> list[Finding]:
    """Why a stage's output differs from the reference's; best first, empty if no variant explains it.

    The stage runs again in fp32 on the reference's inputs, with the engine's weights and config and one thing
    changed at a time. If the unchanged stage gives the reference's output, the engine's code is wrong, and
    the variant that gives the engine's output says how (``before`` and ``after`` are distances to that).
    Otherwise its weights or config are wrong, and the variant that gives the reference's output says how.

    A finding comes within 4 floors, or leaves a tenth of the difference; those within drop the others.
    Attention and whole layers need the inputs from position 0 on. A lost bias is solved from three quarters
    of the tokens and judged by the others.
    """
    if divergence.stage in STAGES:
        return explain_ids(divergence)
    if divergence.layer is not None:  # a layer's own rotary settings
        config = config.replace(rope=config.rope_of(divergence.layer), local_rope=None)
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
    """The first divergence with findings, of those in the first one's layer and step.

    Pass divergences in the order in which they run, with that of the whole layer (``layers.3``). A norm in
    the wrong place shows in a sum first, and only the whole layer tells it from a missing addend: so modules
    come first, then the layer, then the sums.
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
    """Variants that reach the target, else those that come near; of equals the likelier, which came first."""
    exact: dict[str, Finding] = {}
    partial: dict[str, Finding] = {}
    for variant in variants:
        after = bench.error(variant.spec)
        claim = variant.of_engine if bench.code else variant.of_original
        figures = f"the difference falls from {bench.before:.2g} to {after:.2g}"
        evidence = f"with {variant.change} {figures}"
        if bench.code:
            evidence = "its weights and config give the original's output; "
            evidence += f"with {variant.change} they give the engine's ({figures})"
        finding = Finding(claim.culprit, bench.before, after, f"{claim.text}: {evidence}")
        if after <= bench.reach and after * LEAST_CUT <= bench.before:
            exact.setdefault(finding.text, finding)
        elif after * CUT <= bench.before:
            partial.setdefault(finding.text, finding)
    found = list((exact or partial).values())
    alike = max(ALIKE * min((f.after for f in found), default=0.0), LEAST_FLOOR)
    return sorted(found, key=lambda finding: 0.0 if finding.after <= alike else finding.after)


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
    spec, rope, error = bench.spec, bench.config.rope, bench.error
    match spec:
        case AttentionSpec():
            if spec.rope is not None and rope is not None:
                turning = spec.rope
                yield best_number(lambda base: base_variant(spec, turning, rope, base), 1e2, 1e9, error)
            yield best_number(lambda s: scale_variant(spec, s, f"{s:.5g}", f"{s:.5g}"), 1e-4, 1e2, error)
        case NormSpec():
            yield best_number(lambda eps: eps_variant(spec, eps), 1e-13, 1.0, error)
        case LayerSpec():
            yield best_number(lambda scale: branch_variant(spec, scale), 1e-3, 1e2, error)
        case HeadSpec():
            yield best_number(lambda s: logit_scale_variant(spec, s, f"{s:.5g}"), 1e-4, 1e4, error)
        case EmbeddingSpec():
            yield best_number(lambda scale: embedding_scale_variant(spec, scale), 1e-4, 1e4, error)
        case SumSpec():
            yield sum_variant(spec, *solved_factors(spec, bench.inputs, bench.target))


def best_number(
    make: Callable[[float], Variant[SpecT]], low: float, high: float, error: Error
) -> Variant[SpecT]:
    """The variant whose number, between low and high (both above 0), gives the least error: a grid of equal
    ratios, then golden-section search around its best point.
    """
    grid = torch.linspace(math.log(low), math.log(high), GRID, dtype=torch.float64).tolist()

    def cost(point: float) -> float:
        return error(make(math.exp(point)).spec)

    best = min(range(GRID), key=lambda i: cost(grid[i]))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    first, second = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
    at_first, at_second = cost(first), cost(second)
    for _ in range(NARROWINGS):
        if at_first < at_second:
            right, second, at_second = second, first, at_first
            first = right - GOLDEN * (right - left)
            at_first = cost(first)
        else:
            left, first, at_first = first, second, at_second
            second = left + GOLDEN * (right - left)
            at_second = cost(second)
    return make(math.exp((left + right) / 2))


def solved_factors(spec: SumSpec, branch: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Factors of residual and branch whose sum is closest to the target."""
    addends = torch.stack([spec.stream.flatten(), branch.flatten()], dim=1).double().cpu()
    found = torch.linalg.lstsq(addends, target.flatten().double().cpu()[:, None]).solution.flatten()
    return float(found[0]), float(found[1])


def solved_biases(spec: Spec, inputs: torch.Tensor, target: torch.Tensor) -> Iterator[Variant[Spec]]:
    """The stage with one bias solved on all tokens except ``HELD_OUT``."""
    if inputs.shape[0] < FEWEST_TOKENS or inputs.shape[0] != target.shape[0]:
        return
    for names, culprit, tensor in _losable(spec):
        is_last = names[0] in _LAST and len(names) == 1
        found = (_shift if is_last else _solve)(spec, names, inputs, target)
        text = f"the bias {tensor} is missing, or not the original's"
        change = "a bias fitted on three quarters of the tokens (checked on the rest)"
        claim = Claim(f"{culprit}_missing", text)
        yield Variant(found, change, claim, claim)


def _losable(spec: Spec) -> Sequence[tuple[tuple[str, ...], str, str]]:
    """Fields of the biases that the stage could have, culprit and tensor name."""
    name = "" if not hasattr(spec, "name") else spec.name
    match spec:
        case AttentionSpec():
            outer = (("output_bias",), "o_bias", f"{name}.o_proj.bias")
            return (outer, (("qkv_bias",), "qkv_bias", f"{name}.qkv_proj.bias"))
        case MlpSpec():
            inner = ("up_bias",) if spec.gate is None else ("gate_bias", "up_bias")
            inner_name = "up_proj" if spec.gate is None else "gate_up_proj"
            outer = (("down_bias",), "mlp_bias", f"{name}.down_proj.bias")
            return (outer, (inner, "mlp_bias", f"{name}.{inner_name}.bias"))
        case NormSpec():
            return ((("bias",), "norm_bias", f"{name}.bias"),)
        case HeadSpec():
            return ((("bias",), "head_bias", f"{name}.bias"),)
    return ()


def _seen(target: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(target.shape[0], dtype=torch.bool, device=target.device)
    seen[HELD_OUT] = False
    return seen


def _shift(spec: Any, names: Sequence[str], inputs: torch.Tensor, target: torch.Tensor) -> Any:
    (name,) = names
    lacking = (target - run(spec, inputs))[_seen(target)].mean(dim=0)
    return replace(spec, **{name: _start(spec, name) + lacking})


def _solve(spec: Any, names: Sequence[str], inputs: torch.Tensor, target: torch.Tensor) -> Any:
    """Least squares by L-BFGS in fp64, from the present biases or zeros, on tokens not held out."""
    wide = _double(spec)
    seen, products = _seen(target), Products(matrices(wide))
    x, wanted = inputs.double(), target.double()[seen]
    size = wanted.square().sum()
    with torch.enable_grad():
        values = {name: _start(wide, name).requires_grad_() for name in names}
        solver = torch.optim.LBFGS(
            list(values.values()),
            max_iter=FIT_STEPS,
            history_size=20,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> torch.Tensor:
            solver.zero_grad()
            loss = (run(replace(wide, **values), x, products)[seen] - wanted).square().sum() / size
            loss.backward()
            return loss.detach()

        first = float(solver.step(closure))  # the loss before the round
        for _ in range(FIT_ROUNDS - 1):
            if float(solver.step(closure)) > HOPEFUL * first:
                break
    return replace(spec, **{name: value.detach().to(inputs) for name, value in values.items()})


def _start(spec: Any, name: str) -> torch.Tensor:
    bias: torch.Tensor | None = getattr(spec, name)
    weight: torch.Tensor = getattr(spec, _WEIGHTS[name])
    return weight.new_zeros(weight.shape[0]) if bias is None else bias.clone()


def _double(spec: Any) -> Any:
    changed: dict[str, Any] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changed[field.name] = value.double()
        elif is_dataclass(value) and not isinstance(value, type):
            changed[field.name] = _double(value)
    return replace(spec, **changed)
