"""The mix of schemes of least cost whose errors, added up, stay within a budget.

That errors add up is a model: changes of different layers move the logits in unrelated directions, and KL
grows as the square of the move. So what is chosen by it is measured (``settle``).

The choice is the greedy one for a knapsack that takes one item of each class: of every layer the options on
the lower convex hull of (cost, error), steps taken by error saved per unit of cost. Stopped within its last
step it is the optimum of the relaxed problem, so it costs at most that step more than the best choice. Then
every layer that still can goes back to a cheaper option.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MEASURED = 8  # mixes, once one of them has held
_STEP = 0.9  # the next target is at most this part of the expected error of a mix that did not hold

Options = Mapping[str, Sequence["Option"]]
Mix = dict[str, "Option"]


@dataclass(frozen=True)
class Option:
    """A scheme that a layer may have: what it costs, in any unit, and its error alone (KL in nats)."""

    scheme: str
    cost: float
    error: float


@dataclass(frozen=True)
class Settled:
    """The mixes that were measured, with their errors; ``best`` is the cheapest that held, or None."""

    tried: tuple[tuple[Mix, float], ...]
    best: tuple[Mix, float] | None


def expected(mix: Mapping[str, Option]) -> float:
    return math.fsum(option.error for option in mix.values())


def cost(mix: Mapping[str, Option]) -> float:
    return math.fsum(option.cost for option in mix.values())


def choose(options: Options, budget: float) -> Mix:
    """An option per layer: little cost, total error within ``budget``, or the least error possible."""
    hulls = {name: _hull(own) for name, own in options.items()}
    mix = {name: hull[0] for name, hull in hulls.items()}
    steps = [
        (_saved(before, after), name, after)
        for name, hull in hulls.items()
        for before, after in itertools.pairwise(hull)
    ]
    steps.sort(key=lambda step: -step[0])  # stable: a hull's steps keep their order
    for _, name, option in steps:
        if expected(mix) <= budget:
            break
        mix[name] = option
    return _lowered(mix, options, budget)


def settle(
    pick: Callable[[float], Mix],
    measure: Callable[[Mix], float],
    price: Callable[[Mix], tuple[float, ...]],
    budget: float,
) -> Settled:
    """Measure mixes until the one of least ``price`` that holds is found among those that the additive model
    offers: ``pick`` gives a mix whose expected error is at most its argument, or the one of least error.
    """
    tried: list[tuple[Mix, float]] = []
    best: tuple[Mix, float] | None = None
    target, held, failed = budget, 0.0, math.inf  # expected errors: of the last that held, and that failed
    while best is None or len(tried) < MEASURED:
        mix = pick(target)
        if any(mix == other for other, _ in tried):
            break
        found = measure(mix)
        tried.append((mix, found))
        foreseen = expected(mix)
        if found <= budget:
            best = (mix, found) if best is None or price(mix) <= price(best[0]) else best
            held = max(held, target)
        else:
            failed = min(failed, foreseen)
        target = _next(budget, foreseen, found, held, failed, first=best is None)
        if not target >= 0:
            break
    return Settled(tuple(tried), best)


def _next(budget: float, foreseen: float, found: float, held: float, failed: float, *, first: bool) -> float:
    """The next expected error to aim at, judged by how far this mix's sum is off; NaN: none."""
    aimed = budget * foreseen / found if found > 0 else math.inf
    if first:  # nothing held so far
        return min(aimed, _STEP * foreseen) if foreseen > 0 else math.nan
    if held < aimed < failed:
        return aimed
    return (held + failed) / 2 if math.isfinite(failed) and held < failed else math.nan


def _hull(options: Sequence[Option]) -> list[Option]:
    """From the cheapest to the one of least error, each step saving less for its cost than the one before."""
    hull = [min(options, key=lambda option: (option.cost, option.error))]
    while True:
        better = [o for o in options if o.error < hull[-1].error]
        if not better:
            return hull
        hull.append(max(better, key=lambda option: (_saved(hull[-1], option), -option.error)))


def _saved(before: Option, after: Option) -> float:
    """Error saved for each unit of cost."""
    added = after.cost - before.cost
    return (before.error - after.error) / added if added > 0 else math.inf


def _lowered(mix: Mix, options: Options, budget: float) -> Mix:
    """Undo what the budget does not need, the most cost first."""
    mix = dict(mix)
    back = [(mix[name], name, o) for name, own in options.items() for o in own if o.cost < mix[name].cost]
    back.sort(key=lambda step: step[2].cost - step[0].cost)
    for _, name, option in back:
        if option.cost < mix[name].cost and expected(mix | {name: option}) <= budget:
            mix[name] = option
    return mix
