"""How a stored tensor becomes a model's; names may hold ``{layer}``, which weight_map.py expands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]
LAYER = "{layer}"


@dataclass(frozen=True)
class _OneTarget:
    target: str

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names in the model that this rule makes."""
        return (self.target,)


@dataclass(frozen=True)
class Rename(_OneTarget):
    """``target`` is the stored ``source`` as it is."""

    source: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names in the checkpoint, without prefix, that this rule takes."""
        return (self.source,)

    def bind(self, stored: int, built: int) -> Rename:
        """The rule for layer ``stored`` of the checkpoint, which is layer ``built`` of the model."""
        return type(self)(_put(self.target, built), _put(self.source, stored))

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        """Shape of ``target`` from those of the inputs; ValueError says why there is none."""
        return sources[0]

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make ``target`` from the inputs."""
        return sources[0]


class Transpose(Rename):
    """``target`` is the transpose [out, in] of the stored ``source`` [in, out], as GPT-2's Conv1D needs."""

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        if len(sources[0]) != 2:
            raise ValueError(f"only a matrix can be transposed, {self.source} is {list(sources[0])}")
        return sources[0][::-1]

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return sources[0].t()


class PlusOne(Rename):
    """``target`` is the stored ``source`` plus one, in fp32: Gemma stores the weights of its norms so."""

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return sources[0].float() + 1


class Squeezed(Rename):
    """``target`` is the stored ``source`` without its leading dimensions of 1."""

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        shape = sources[0]
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        return shape

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return sources[0].reshape(self.shape(target, [tuple(sources[0].shape)]))


@dataclass(frozen=True)
class RowsFrom(Rename):
    """``target`` is the stored ``source`` from row ``start`` on: OPT's table of positions begins at row 2."""

    start: int

    def bind(self, stored: int, built: int) -> RowsFrom:
        return self

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        shape = sources[0]
        if not shape or shape[0] <= self.start:
            raise ValueError(f"{self.source} {list(shape)} has no row {self.start}")
        return (shape[0] - self.start, *shape[1:])

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy, so that the rows before are not kept."""
        return sources[0][self.start :].clone()


@dataclass(frozen=True)
class SquarePositions(Rename):
    """``target`` [1 + grid², size] is the table [1, 1 + n², size] of a class token and a square of patches,
    the square brought to ``grid`` patches a side by bicubic interpolation in fp32.
    """

    grid: int

    def bind(self, stored: int, built: int) -> SquarePositions:
        return self

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        if len(sources[0]) != 3 or sources[0][0] != 1:
            raise ValueError(f"{self.source} {list(sources[0])} is no table of positions")
        return (1 + self.grid**2, sources[0][2])

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stored table where it fits, else fp32."""
        table = sources[0][0]
        side = math.isqrt(len(table) - 1)
        if side == self.grid:
            return table
        square = table[1:].float().unflatten(0, (side, side)).permute(2, 0, 1)[None]
        size = (self.grid, self.grid)
        found = F.interpolate(square, size, mode="bicubic", align_corners=False)[0].flatten(1).T
        return torch.cat([table[:1].float(), found])


@dataclass(frozen=True)
class Filled(_OneTarget):
    """``target`` is of one value, because the checkpoint leaves it out."""

    size: int
    value: float

    @property
    def inputs(self) -> tuple[str, ...]:
        return ()

    def bind(self, stored: int, built: int) -> Filled:
        return self

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        return (self.size,)

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.full((self.size,), self.value)


@dataclass(frozen=True)
class Concat(_OneTarget):
    """``target`` is the stored ``sources`` joined along ``dim``; the dtype is the one that holds them all.

    ``gap`` (place, size) puts zeros before the source of that place: the bias of keys that have none.
    """

    sources: tuple[str, ...]
    dim: int = 0
    gap: tuple[int, int] = (0, 0)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.sources

    def bind(self, stored: int, built: int) -> Concat:
        sources = tuple(_put(source, stored) for source in self.sources)
        return replace(self, target=_put(self.target, built), sources=sources)

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        """The sum along ``dim``, gap included; all else must agree."""
        listed = ", ".join(f"{name} {list(s)}" for name, s in zip(self.sources, sources, strict=True))
        dim = _axis(self.dim, sources[0], listed)
        if len({(len(s), s[:dim], s[dim + 1 :]) for s in sources}) != 1:
            raise ValueError(f"cannot be joined along {self.dim}: {listed}")
        size = sum(s[dim] for s in sources) + self.gap[1]
        return (*sources[0][:dim], size, *sources[0][dim + 1 :])

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        parts, (place, size) = list(sources), self.gap
        if size:
            shape = list(parts[0].shape)
            shape[self.dim] = size
            parts.insert(place, parts[0].new_zeros(shape))
        return torch.cat(parts, self.dim)


@dataclass(frozen=True)
class SplitRule:
    """``targets`` are consecutive parts, ``sizes`` long, of the stored ``source`` along ``dim``."""

    targets: tuple[str, ...]
    source: str
    sizes: tuple[int, ...]
    dim: int = 0

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.targets

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.source,)

    def bind(self, stored: int, built: int) -> SplitRule:
        targets = tuple(_put(target, built) for target in self.targets)
        return SplitRule(targets, _put(self.source, stored), self.sizes, self.dim)

    def shape(self, target: str, sources: Sequence[Shape]) -> Shape:
        """The source's, with the part's size along ``dim``."""
        stored = sources[0]
        dim = _axis(self.dim, stored, f"{self.source} {list(stored)}")
        if len(self.sizes) != len(self.targets) or sum(self.sizes) != stored[dim]:
            raise ValueError(f"{self.source} {list(stored)} is not {list(self.sizes)} along {self.dim}")
        return (*stored[:dim], self.sizes[self.targets.index(target)], *stored[dim + 1 :])

    def build(self, target: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of the part, so that no target shares memory with another."""
        part = self.targets.index(target)
        return sources[0].narrow(self.dim, sum(self.sizes[:part]), self.sizes[part]).clone()


@dataclass(frozen=True)
class Tie:
    """``target`` is the same tensor as the target ``source_target``; nothing is stored for it.

    The checkpoint may hold a copy, named ``copy`` (or as ``target``); it is not read. The model need not list
    ``target`` among its tensors.
    """

    target: str
    source_target: str
    copy: str | None = None


@dataclass(frozen=True)
class Ignore:
    """Stored tensors that no model needs: an fnmatch pattern, tried with and without the prefix."""

    pattern: str


Transform = Rename | Concat | SplitRule | Filled
Rule = Transform | Tie | Ignore


def has_layer(rule: Transform) -> bool:
    """Whether the rule stands for one rule a layer."""
    return any(LAYER in name for name in (*rule.inputs, *rule.outputs))


def _put(name: str, layer: int) -> str:
    return name.replace(LAYER, str(layer))


def _axis(dim: int, shape: Shape, listed: str) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"there is no dimension {dim}: {listed}")
    return dim % len(shape)
