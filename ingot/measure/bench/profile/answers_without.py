"""Scores of an engine's answers with its kernels, and with PyTorch's operators in a kernel's place.

records = scored_without(side, ("rms_norm", "rope"), answers)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ingot.measure.bench.profile.pytorch_operators import FUSED, without_kernels
from ingot.measure.bench.profile.replaced import replaced
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.open_side import Say, silent

Record = dict[str, Any]


class Answers(Protocol):
    """Asks a side that is open, and scores what it answers."""

    def facts(self) -> Record:
        """The data and how it is asked, for the record."""

    def of(self, side: IngotSide, progress: Callable[[str, int, int], None]) -> Any:
        """The side's answers, for ``compared``."""

    def compared(self, own: Any, other: Any) -> Record:
        """Scores of both, and how many answers are the same."""


def scored_without(
    side: IngotSide, names: Sequence[str], answers: Answers, say: Say = silent
) -> list[Record]:
    """Of each operation the scores with our kernels and with PyTorch's operators. Steps must run without a
    graph, and the side has no other requests.

    Both sides run every module by its own kernel: in a step of few tokens fused kernels do the work of other
    operations. Only ``fused`` compares them. No prompt reuses blocks, which the other side has computed.
    """
    executor, own, records = side.llm.executor, {}, []
    forward = executor.runner.forward

    def asked(title: str) -> Any:
        return answers.of(side, lambda _, done, total: say(f"{title}: answer {done} of {total}"))

    with replaced(executor.blocks, "prefix_reuse", False):
        for name in names:
            fused = name == FUSED and forward.fused
            with replaced(forward, "fused", fused):
                if fused not in own:
                    own[fused] = asked("with our kernels")
                with without_kernels(name, executor.runner):
                    other = asked(f"without {name}")
            records.append(answers.compared(own[fused], other))
    return records
