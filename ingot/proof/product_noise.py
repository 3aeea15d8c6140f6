"""How far the rounding of a product's sums may move the places behind it.

| product | places | from outputs to there |
|---|---|---|
| qkv_proj | query, keys | the largest of a head's, times what norm and position do to the head's size |
| qkv_proj, q_proj | values, cross_query | as it is |
| gate_up_proj, up_proj | inner | an activation is no steeper than 1.13 and no larger than its argument |
| o_proj, down_proj | stream | as it is, times what a norm behind the branch does to the value |
| any other | itself | as it is |
"""

from __future__ import annotations

import torch

_STEEPEST = 1.13  # of SiLU, GELU (both forms) and ReLU
_PLACES = {
    "qkv_proj": ("query", "keys", "values"),
    "q_proj": ("cross_query",),
    "o_proj": ("stream",),
    "gate_up_proj": ("inner",),
    "up_proj": ("inner",),
    "down_proj": ("stream",),
    "lm_head": ("logits",),
}


class ProductNoise:
    """Of the newest product before each place."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, product: str, output: torch.Tensor, noise: torch.Tensor) -> None:
        """Keep a product's outputs [T, N], and how far rounding may have moved each."""
        for place in _PLACES.get(product.rpartition(".")[2], (product,)):
            self._kept[place] = output, noise

    def take(self, place: str, computed: torch.Tensor) -> torch.Tensor | None:
        """The noise at a place [T, ...], once; ``computed`` is what was made of the outputs there."""
        kept = self._kept.pop(place, None)
        if kept is None:
            return None
        output, noise = (_own(part, place, computed.flatten(1).shape[1]) for part in kept)
        if place in ("query", "keys"):
            heads = noise.view_as(computed).amax(-1, keepdim=True)
            return (heads * _ratio(_rms(computed), _rms(output.view_as(computed)))).expand_as(computed)
        if place == "inner":
            if output.shape[1] == computed.shape[1]:
                return _STEEPEST * noise
            (gate, up), (of_gate, of_up) = output.chunk(2, dim=-1), noise.chunk(2, dim=-1)
            return _STEEPEST * of_gate * up.abs() + gate.abs() * of_up
        if place == "stream":
            return noise * _ratio(computed.abs(), output.abs())
        return noise.view_as(computed)


def _own(part: torch.Tensor, place: str, columns: int) -> torch.Tensor:
    """A place's columns of a product's: queries, then as many keys as values."""
    if place == "query":
        return part[:, :columns]
    if place in ("keys", "values"):
        return part[:, -2 * columns : -columns] if place == "keys" else part[:, -columns:]
    return part


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole, 1.0)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()
