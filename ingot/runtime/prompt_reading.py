"""What is read of a prompt, chunk by chunk.

Owns the pieces of one request that generates nothing: what is kept of its logits or hidden states, and the
scores of its cross-attention. Knows no step.

    reading = PromptReading(keep)
    reading.add(logits, start=0); reading.kept
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ingot.runtime.likelihood import Keep


@dataclass
class PromptReading:
    """``keep`` is given a chunk's values and the position of its first token."""

    keep: Keep
    _pieces: list[torch.Tensor] = field(default_factory=list)
    _scores: list[torch.Tensor] = field(default_factory=list)

    def add(self, values: torch.Tensor, start: int, scores: torch.Tensor | None = None) -> None:
        """One more chunk; a preempted prompt starts over."""
        if start == 0:
            self._pieces.clear()
            self._scores.clear()
        self._pieces.append(self.keep(values, start))
        if scores is not None:
            self._scores.append(scores)

    @property
    def kept(self) -> torch.Tensor:
        """What ``keep`` left of all chunks."""
        return torch.cat(self._pieces)

    @property
    def scores(self) -> torch.Tensor:
        """Of cross-attention, float32 [tokens, heads, positions] on the CPU; empty where none was wanted."""
        return torch.cat(self._scores) if self._scores else torch.empty(0)
