"""Numbers that no list holds: solved from what the original put out.

Owns the search for one number (a base, an epsilon, a scale) and the solving for a bias that the engine lost.
A bias is solved on three quarters of the tokens and must hold for the others. Knows no list of variants.

    variant = best_number(lambda base: base_variant(...), 1e2, 1e9, error)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from ingot.measure.align.diagnosis.stage_spec import (
    AttentionSpec,
    HeadSpec,
    MlpSpec,
    Products,
    Spec,
    SumSpec,
    matrices,
    run,
)
from ingot.measure.align.diagnosis.variant import Claim, SpecT, Variant
from ingot.reference.plain_layer import NormSpec

GRID, NARROWINGS = 33, 45
GOLDEN = (math.sqrt(5.0) - 1) / 2
FIT_STEPS, FIT_ROUNDS = 20, 8
HOPEFUL = 0.25  # a fit goes on if its first round leaves no more than this of the squares
FEWEST_TOKENS = 4
HELD_OUT = slice(3, None, 4)  # tokens that a solved bias is judged by

Error = Callable[[Any], float]


def best_number(
    make: Callable[[float], Variant[SpecT]], low: float, high: float, error: Error
) -> Variant[SpecT]:
    """The variant whose number, between low and high (both above 0), gives the least error.

    A grid of equal ratios, then golden-section search around its best point.
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
    """Factors of residual and branch whose sum is nearest to the target."""
    addends = torch.stack([spec.stream.flatten(), branch.flatten()], dim=1).double().cpu()
    found = torch.linalg.lstsq(addends, target.flatten().double().cpu()[:, None]).solution.flatten()
    return float(found[0]), float(found[1])


def solved_biases(spec: Spec, inputs: torch.Tensor, target: torch.Tensor) -> Iterator[Variant[Spec]]:
    """The stage with one bias solved so that it gives the target on all but the ``HELD_OUT`` tokens."""
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
    """Fields of the biases that the stage could have, the culprit and the tensor's name."""
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


_WEIGHTS = {
    "output_bias": "output",
    "qkv_bias": "qkv",
    "down_bias": "down",
    "up_bias": "up",
    "gate_bias": "gate",
    "bias": "weight",
}


_LAST = ("output_bias", "down_bias", "bias")  # added at the very end: the mean of what is lacking


def _seen(target: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(target.shape[0], dtype=torch.bool, device=target.device)
    seen[HELD_OUT] = False
    return seen


def _shift(spec: Any, names: Sequence[str], inputs: torch.Tensor, target: torch.Tensor) -> Any:
    (name,) = names
    lacking = (target - run(spec, inputs))[_seen(target)].mean(dim=0)
    return replace(spec, **{name: _start(spec, name) + lacking})


def _solve(spec: Any, names: Sequence[str], inputs: torch.Tensor, target: torch.Tensor) -> Any:
    """Least squares by L-BFGS in fp64, from the biases there are (or zeros), on tokens not held out."""
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
