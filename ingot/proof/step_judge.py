"""The limits of step and encoder checks, and the places beyond them.

Each value may be off by ``ALLOWED`` units of its own size and of its row's; all values with one label
together, as a factor, by half a unit. A quantized value that is not the nearest must lie as near to the
middle between two as that noise reaches. A unit is the dtype's epsilon, or in fp32 the noise of a sum of K
terms.
"""

from __future__ import annotations

import torch

ALLOWED = 4.0  # units
# An error of a score is one of its weight, times the score; one of a gate, times the channel beside it.
ALLOWED_OF = {"attended": 16.0, "cross_attended": 16.0, "inner": 16.0}
_SIGMAS = 6.0  # of what chance makes of a factor
_FEW = 0.005  # of all values
_TINY = 1e-30
ENCODED = 2
_LABELS = {0: "prompt tokens", 1: "decoded tokens", ENCODED: "encoded positions"}


class Judge:
    """Compares and remembers, in the order of execution.

    Args:
        unit: the noise of one operation, relative.
        eps: of the dtype that values are rounded to.
    """

    def __init__(self, unit: float, eps: float) -> None:
        self.unit = unit
        self.eps = eps
        self.worst: dict[str, float] = {}
        self._failures: dict[str, dict[str, str]] = {}  # by kind: place → message

    def failures(self) -> list[tuple[str, str]]:
        """(place, message) of the first place of every kind that is beyond its limit."""
        found = []
        for of_kind in self._failures.values():
            place, message = next(iter(of_kind.items()))
            others = f", and so are {len(of_kind) - 1} places like it" if len(of_kind) > 1 else ""
            found.append((place, f"{place} {message}{others}"))
        return found

    def fail(self, kind: str, place: str, message: str) -> None:
        self._keep(kind, place, float("inf"), message)

    def value(
        self,
        kind: str,
        place: str,
        recorded: torch.Tensor,
        computed: torch.Tensor,
        change: torch.Tensor | None,
        labels: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Judge recorded values [T, ...] beside computed ones.

        Args:
            change: the part that a product added.
            noise: of the product before, one unit of each value, on top of its size's.
        """
        recorded, computed = recorded.flatten(1), computed.flatten(1)
        moved = computed if change is None else change.flatten(1)
        limit = self._units(kind) * (moved.abs() + _rms(moved)) + _of_product(noise)
        if change is not None:
            size = torch.maximum(computed.abs(), recorded.abs())
            limit = limit + 2 * self.eps * size  # the sum is rounded, too
        off = difference(recorded, computed)
        self._judge(kind, place, off.abs(), limit, off, moved, labels)

    def rounded(
        self,
        kind: str,
        place: str,
        recorded: torch.Tensor,
        step: torch.Tensor,
        exact: torch.Tensor,
        near: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Judge values [T, K] that are multiples of ``step``, beside the exact ones and those rounded here.

        One that is not the nearest must be half a step from the exact one, within noise: the other neighbour
        of a value in the middle between two. ``noise`` as of ``value``.
        """
        recorded, exact, near = recorded.flatten(1), exact.flatten(1), near.flatten(1)
        from_middle = (difference(recorded, exact).abs() - step / 2).abs()
        beyond = torch.minimum(from_middle, difference(recorded, near).abs())
        limit = self._units(kind) * (exact.abs() + _rms(exact)) + _of_product(noise)
        self._judge(kind, place, beyond, limit, difference(recorded, near), near, labels)

    def _units(self, kind: str) -> float:
        return self.unit * ALLOWED_OF.get(kind, ALLOWED)  # relative

    def _judge(
        self,
        kind: str,
        place: str,
        off: torch.Tensor,
        limit: torch.Tensor,
        signed: torch.Tensor,
        of: torch.Tensor,
        labels: torch.Tensor,
    ) -> None:
        ratios = off / limit.clamp(min=_TINY)
        ratios = torch.where(torch.isfinite(ratios), ratios, torch.inf)
        rows = ratios.amax(1) if ratios.numel() else ratios.new_zeros(len(ratios))
        for label in labels.unique().tolist():
            chosen = labels == label
            worst, beyond = float(rows[chosen].max()), int((rows[chosen] > 1).sum())
            of_tokens = f"in {beyond} of {int(chosen.sum())} {_LABELS[label]}"
            self._keep(kind, place, worst, f"is off by {worst:.3g} times the limit for rounding, {of_tokens}")
            factor, allowed = self._factor(signed[chosen], of[chosen])
            message = f"is off by a factor of {1 + factor:.5g} in {_LABELS[label]}"
            self._keep(kind, place, abs(factor) / allowed, message)

    def _factor(self, signed: torch.Tensor, of: torch.Tensor) -> tuple[float, float]:
        """By which factor less 1 values are off together, and what is allowed."""
        finite = torch.isfinite(signed) & torch.isfinite(of)
        signed, of = (torch.where(finite, part, 0).double() for part in (signed, of))
        size = float(of.square().sum())
        if not size:
            return 0.0, 1.0
        noise = (float(signed.square().sum()) / size) ** 0.5 / of.numel() ** 0.5
        # A few values at the other neighbour are no factor; the same tokens repeat them.
        few = float((signed.abs() > self.unit / 2 * of.abs()).double().mean()) < _FEW
        return (0.0 if few else float((signed * of).sum()) / size), self.unit / 2 + _SIGMAS * noise

    def _keep(self, kind: str, place: str, ratio: float, message: str) -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), ratio)
        if ratio > 1:
            self._failures.setdefault(kind, {}).setdefault(place, message)


def difference(recorded: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """recorded - computed; 0 where both are not finite."""
    same = ~torch.isfinite(recorded) & ~torch.isfinite(computed)
    return torch.where(same, 0, recorded - computed)


def _of_product(noise: torch.Tensor | None) -> torch.Tensor | float:
    return 0.0 if noise is None else ALLOWED * noise.flatten(1)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()
