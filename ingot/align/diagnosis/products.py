"""Products that variants share, computed once.

Owns the memory of x · Wᵀ for the weights of one stage: most variants change what is done with a product and
not the product. Knows no stage.

    products = Products(weights); products(x, weight, bias)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Products:
    """``F.linear`` that keeps the last product of each weight it was made for."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in], weight [out, in], bias [out] → [T, out]."""
        if id(weight) not in self._weights or x.requires_grad:
            return F.linear(x, weight, bias)
        kept = self._kept.get(id(weight))
        if kept is None or not (kept[0] is x or torch.equal(kept[0], x)):
            kept = self._kept[id(weight)] = (x, F.linear(x, weight))
        return kept[1] if bias is None else kept[1] + bias


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product, computed each time."""
    return F.linear(x, weight, bias)
