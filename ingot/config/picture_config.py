"""The size and normalization of pixels that a picture encoder reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MOST_SIDE = 4096


@dataclass(frozen=True)
class PictureFeatures(JsonConfig):
    """Pixels [3, side, side], RGB: (value - mean) / std of values in [0, 1].

    Attributes:
        side: of the square, in pixels.
        mean: per channel, red first.
        std: standard deviation, per channel.
    """

    side: int
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def __post_init__(self) -> None:
        if not _is(self.side, int) or not 1 <= self.side <= _MOST_SIDE:
            raise ConfigError(
                "side of a picture is out of range", seen=self.side, allowed=f"1 to {_MOST_SIDE}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            is_triple = isinstance(values, tuple) and len(values) == 3
            if not is_triple or not all(_is(one, (int, float)) and math.isfinite(one) for one in values):
                what = f"{name} of pixels must be three numbers, for red, green and blue"
                raise ConfigError(what, seen=values)
        if min(self.std) <= 0:
            raise ConfigError("std of pixels must be positive", seen=self.std)


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
