"""One stage that differs from the original, and what explains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """One stage whose output is not the reference's.

    Attributes:
        stage: ``layers.3.input_norm``, ``.attention``, ``.residual`` (hidden states after attention),
            ``.post_norm``, ``.mlp``, ``.output`` (hidden states after the MLP); ``layers.3`` (the whole
            layer), ``embedding``, ``final_norm``, ``logits``, ``prompt``, ``ids`` or ``greedy``.
        layer: its number; None outside layers.
        step: 0 for the prompt, then one per token.
        positions: [T], of the tokens.
        inputs: the reference's input of the stage's module, [T, hidden]; of attention in a cached step that
            of all tokens so far, [S, hidden]; of a sum (``.residual``, ``.output``) the branch; of the
            embedding the ids, [T].
        expected: the reference's output, [T, ...].
        got: the engine's output, [T, ...].
        floor: relative L2 difference that counts as noise.
    """

    stage: str
    layer: int | None
    step: int
    positions: torch.Tensor
    inputs: torch.Tensor
    expected: torch.Tensor
    got: torch.Tensor
    floor: float


@dataclass(frozen=True)
class Finding:
    """A variant that explains a divergence: a name that is stable between versions, the relative L2
    difference to the expected output without and with it, and one sentence for people.
    """

    culprit: str
    before: float
    after: float
    text: str
