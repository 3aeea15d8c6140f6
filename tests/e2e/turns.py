"""A pace without a clock, so that tests get the same chunks and layers on any machine.
with turns(): llm = LLM(folder, runtime=RuntimeConfig(prompt_chunk=3, prompt_share=0.1))
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ingot.runtime import setup
from ingot.runtime.scheduling.pace import Pace

SIZES = (4, 8, 16)


class Turns(Pace):
    """Chunks of up to 11, 4 and 7 tokens in turn, of which steps run one or two layers."""

    def __init__(self, share: float, num_layers: int) -> None:
        super().__init__(share, num_layers, SIZES)
        self._counts, self._rng = itertools.cycle((11, 4, 7)), random.Random(0)

    def chunk(self, left: int) -> int:
        """As of ``Pace``."""
        return min(next(self._counts), left)

    def last(self, first: int) -> int:
        """As of ``Pace``; never all layers at once."""
        return min(first + self._rng.choice((1, 2)), self.num_layers) if first else 1


@contextmanager
def turns() -> Iterator[None]:
    """Executors that are made in the block have such a pace where their config has a share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "Pace", Turns)
        yield
