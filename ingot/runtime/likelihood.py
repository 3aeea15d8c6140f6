"""What is kept of a prompt's logits and hidden states, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ingot.runtime.sampling.log_normaliser import log_normaliser

Keep = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class PromptReading:
    """What is kept of a prompt; ``keep`` is given a chunk's values and the position of its first token."""

    keep: Keep
    _pieces: list[torch.Tensor] = field(default_factory=list)
    _scores: list[torch.Tensor] = field(default_factory=list)

    def add(self, values: torch.Tensor, start: int, scores: torch.Tensor | None = None) -> None:
        """Add a chunk; a preempted prompt starts over."""
        if start == 0:
            self._pieces.clear()
            self._scores.clear()
        self._pieces.append(self.keep(values, start))
        if scores is not None:
            self._scores.append(scores)

    @property
    def kept(self) -> torch.Tensor:
        return torch.cat(self._pieces)

    @property
    def scores(self) -> torch.Tensor:
        """Of cross-attention, float32 [tokens, heads, positions] on the CPU; empty: none was wanted."""
        return torch.cat(self._scores) if self._scores else torch.empty(0)


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[i, targets[i]]: [n, vocab_size] and [n] int64 → [n] float32, on the same device."""
    return (logits.gather(1, targets[:, None]) - log_normaliser(logits))[:, 0].float()


def keep_logits(logits: torch.Tensor, start: int) -> torch.Tensor:
    """All of a chunk's logits, float32 on the CPU."""
    return logits.cpu().float()


def keep_likelihood(prompt_ids: Sequence[int], below: int | None = None) -> Keep:
    """Of a chunk's logits only the log-probabilities of the tokens that follow, [count] float32 on the CPU;
    after the prompt's last token nothing follows.

    ``below``: only ids below it count, as if there were no others; others have -inf.
    """

    def keep(logits: torch.Tensor, start: int) -> torch.Tensor:
        targets = torch.tensor(prompt_ids[start + 1 : start + 1 + len(logits)], device=logits.device).long()
        logits = logits[: len(targets), :below]
        known = targets < logits.shape[1]
        found = target_logprobs(logits, torch.where(known, targets, 0))
        return torch.where(known, found, -torch.inf).cpu()

    return keep


def keep_sum(hidden: torch.Tensor, start: int) -> torch.Tensor:
    """The sum of a chunk's hidden states, float32 [1, hidden_size] on the CPU."""
    return hidden.sum(0, keepdim=True, dtype=torch.float32).cpu()


def keep_last(hidden: torch.Tensor, start: int) -> torch.Tensor:
    """The hidden states of a chunk's last token, float32 [1, hidden_size] on the CPU."""
    return hidden[-1:].to("cpu", torch.float32, copy=True)  # a view would hold the whole chunk
