"""A checkpoint's tensors by pattern: one line per kind of tensor, whatever the number of layers.

patterns = tensor_patterns(checkpoint.tensors)    # model.layers.{i}.mlp.up_proj.weight [48, 32] x2
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.checkpoint.shard_reader import TensorInfo
from ingot.config.json_config import JsonConfig

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_LETTERS = "ijkl"  # of the first, second … number of a name


@dataclass(frozen=True)
class TensorPattern(JsonConfig):
    """Tensors whose names differ only in numbers.

    Attributes:
        name: with ``{i}`` for the first number, ``{j}`` for the second, …
        shape: the most frequent one.
        count: how many tensors.
        other_shapes: how many of them have another shape.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    other_shapes: int = 0

    def __str__(self) -> str:
        odd = f" ({self.other_shapes} of another shape)" if self.other_shapes else ""
        return f"{self.name} {list(self.shape)} ×{self.count}{odd}"


def pattern_of(name: str) -> str:
    """A tensor's name with letters for its numbers."""
    place = 0

    def letter(match: re.Match[str]) -> str:
        nonlocal place
        place += 1
        return "{" + _LETTERS[min(place, len(_LETTERS)) - 1] + "}"

    return _NUMBER.sub(letter, name)


def tensor_patterns(tensors: Mapping[str, TensorInfo]) -> list[TensorPattern]:
    """One entry per pattern, in the order of the files."""
    shapes: dict[str, Counter[tuple[int, ...]]] = {}
    for name, info in tensors.items():
        shapes.setdefault(pattern_of(name), Counter())[tuple(info.shape)] += 1
    found = []
    for name, counted in shapes.items():
        shape, most = counted.most_common(1)[0]
        found.append(TensorPattern(name, shape, counted.total(), counted.total() - most))
    return found
