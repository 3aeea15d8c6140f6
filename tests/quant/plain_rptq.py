"""RPTQ on OPT a second time, in NumPy and fp64: the paper's algorithm (arXiv 2304.01089) as its code has it.

Nothing of Ingot is here. A layer is observed as it is; channels are clustered by (largest, smallest) value
with k-means; a cluster has one scale and one zero, of a moving average over records; inputs are rounded to
whole values in floating point. Layers after it see what the rounded layer gives.

    model = PlainOpt(load_file("model.safetensors"), layers=2, heads=2)
    sites = model.calibrated(records, weights, clusters={"R1": 4, "R3": 2, "R4": 4, "R5": 4}, bits=bits)
    logits = model.logits(ids, weights, sites)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
PRODUCTS = {"R1": "qkv", "R3": "out", "R4": "fc1", "R5": "fc2"}
_LEAST_SCALE = 1e-4


def kmeans(points: Array, clusters: int, starts: int = 10) -> Indices:
    """Labels of the best of some starts: Lloyd's rounds behind k-means++, with NumPy's draws."""
    draws = np.random.default_rng(0)
    best, least = np.zeros(len(points), np.int64), np.inf
    for _ in range(starts):
        centres = points[[draws.integers(len(points))]]
        while len(centres) < clusters:
            near = ((points[:, None] - centres) ** 2).sum(-1).min(1)
            odds = near / near.sum() if near.sum() else np.full(len(points), 1 / len(points))
            centres = np.concatenate([centres, points[[draws.choice(len(points), p=odds)]]])
        labels = np.full(len(points), -1)
        while True:
            found = ((points[:, None] - centres) ** 2).sum(-1).argmin(1)
            if (found == labels).all():
                break
            labels = found
            filled = [labels == one for one in range(clusters)]
            centres = np.stack(
                [points[own].mean(0) if own.any() else centres[n] for n, own in enumerate(filled)]
            )
        inertia = inertia_of(points, labels)
        if inertia < least:
            best, least = labels, inertia
    return best


def inertia_of(points: Array, labels: Indices) -> float:
    """The sum of squared distances to the means of clusters."""
    parts = [points[labels == one] for one in np.unique(labels)]
    return float(sum(((part - part.mean(0)) ** 2).sum() for part in parts))


@dataclass(frozen=True)
class Cluster:
    """Channels with one scale and zero: x ≈ (q - zero) · scale."""

    channels: frozenset[int]
    scale: float
    zero: float


@dataclass(frozen=True)
class Site:
    """An input in clusters."""

    clusters: tuple[Cluster, ...]
    bits: int

    def rounded(self, x: Array) -> Array:
        """x [T, K] as its clusters' whole values mean it."""
        out, low, high = np.empty_like(x), -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        for one in self.clusters:
            own = sorted(one.channels)
            q = np.clip(np.rint(x[:, own] / one.scale) + one.zero, low, high)
            out[:, own] = (q - one.zero) * one.scale
        return out


def site_of(records: Sequence[Array], clusters: int, bits: int, heads: int = 1) -> Site:
    """The clusters of an input [tokens, channels] of each record, within each of some heads."""
    highest = np.stack([one.max(0) for one in records])  # [records, channels]
    lowest = np.stack([one.min(0) for one in records])
    points = np.stack([highest.max(0), lowest.min(0)], -1)
    size, found = points.shape[0] // heads, []
    for head in range(heads):
        labels = kmeans(points[head * size : (head + 1) * size], clusters)
        for one in np.unique(labels):
            own = np.flatnonzero(labels == one) + head * size
            high, low = highest[0, own].max(), lowest[0, own].min()
            for record in range(1, len(records)):
                high = 0.99 * high + 0.01 * highest[record, own].max()
                low = 0.99 * low + 0.01 * lowest[record, own].min()
            scale = max((high - low) / 2**bits, _LEAST_SCALE)
            found.append(Cluster(frozenset(own.tolist()), scale, float(np.rint(-(high + low) / (2 * scale)))))
    return Site(tuple(found), bits)


Sites = Mapping[tuple[int, str], Site]
Weights = Mapping[tuple[int, str], Array]


class PlainOpt:
    """OPT from the tensors of its checkpoint; products take the weights that they are given."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]], layers: int, heads: int) -> None:
        self._own = {name: np.asarray(one, np.float64) for name, one in tensors.items()}
        self.layers, self._heads = layers, heads

    def weights(self) -> dict[tuple[int, str], Array]:
        """The checkpoint's own, q, k and v one below another."""
        found = {}
        for layer in range(self.layers):
            qkv = [self._get(f"layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            found[layer, "qkv"] = np.concatenate(qkv)
            found[layer, "out"] = self._get(f"layers.{layer}.self_attn.out_proj.weight")
            found |= {(layer, fc): self._get(f"layers.{layer}.{fc}.weight") for fc in ("fc1", "fc2")}
        return found

    def calibrated(
        self,
        records: Sequence[Sequence[int]],
        weights: Weights,
        clusters: Mapping[str, int],
        bits: Mapping[str, int],
    ) -> dict[tuple[int, str], Site]:
        """The sites of every layer; ``weights`` are the quantized ones, which later layers see."""
        dense, found = self.weights(), {}
        hidden = [self._embedded(ids) for ids in records]
        for layer in range(self.layers):
            seen: dict[str, list[Array]] = {name: [] for name in PRODUCTS}
            for x in hidden:
                self._layer(x, layer, dense, {}, seen)
            for name, inputs in seen.items():
                heads = self._heads if name == "R3" else 1
                found[layer, name] = site_of(inputs, clusters[name], bits[name], heads)
            hidden = [self._layer(x, layer, weights, found) for x in hidden]
        return found

    def logits(self, ids: Sequence[int], weights: Weights, sites: Sites) -> Array:
        """[T, vocabulary]; an input without a site is not rounded."""
        x = self._embedded(ids)
        for layer in range(self.layers):
            x = self._layer(x, layer, weights, sites)
        return self._norm(x, "final_layer_norm") @ self._get("embed_tokens.weight").T

    def _get(self, name: str) -> Array:
        return self._own[f"model.decoder.{name}"]

    def _embedded(self, ids: Sequence[int]) -> Array:
        places = np.arange(len(ids)) + 2
        return self._get("embed_tokens.weight")[list(ids)] + self._get("embed_positions.weight")[places]

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self._get(f"{name}.weight") + self._get(f"{name}.bias")

    def _layer(
        self,
        x: Array,
        layer: int,
        weights: Weights,
        sites: Sites,
        seen: dict[str, list[Array]] | None = None,
    ) -> Array:
        own = f"layers.{layer}."
        attn = own + "self_attn."
        biases = {
            "R1": np.concatenate([self._get(f"{attn}{part}_proj.bias") for part in "qkv"]),
            "R3": self._get(attn + "out_proj.bias"),
            "R4": self._get(own + "fc1.bias"),
            "R5": self._get(own + "fc2.bias"),
        }

        def product(site: str, given: Array) -> Array:
            if seen is not None:
                seen[site].append(given)
            rounded = sites[layer, site].rounded(given) if (layer, site) in sites else given
            return rounded @ weights[layer, PRODUCTS[site]].T + biases[site]

        x = x + product("R3", self._attended(product("R1", self._norm(x, own + "self_attn_layer_norm"))))
        inner = np.maximum(product("R4", self._norm(x, own + "final_layer_norm")), 0)
        return x + product("R5", inner)

    def _attended(self, qkv: Array) -> Array:
        """Causal attention of q, k and v [T, 3 · hidden size]."""
        count = len(qkv)
        q, k, v = qkv.reshape(count, 3, self._heads, -1).transpose(1, 2, 0, 3)  # [heads, T, head size]
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        return (odds / odds.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(count, -1)
