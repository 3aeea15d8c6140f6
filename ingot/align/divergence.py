"""What a divergence hands to the search for its cause.

Owns the evidence about one bad module. Knows neither how it was found nor what it means.

    divergence = Divergence("layers.3.mlp", 3, 0, positions, inputs, expected, got, floor=4e-4)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """A stage at which the engine leaves the reference.

    Attributes:
        stage: ``layers.3.attention``, ``layers.3.mlp``, ``embedding``, ``final_norm``, ``logits`` ...
        layer: the layer's number in the engine; None outside the layers.
        step: 0 for the prompt, 1 and up for cached decode steps.
        positions: [T] int64, of the tokens that ran in this step.
        inputs: the reference's input of the stage's module, [T, hidden_size]; of an attention in a cached
            step, the inputs of all tokens so far, [S, hidden_size]; of the embedding, token ids [T].
        expected: the reference's output, [T, ...].
        got: the engine's output, [T, ...].
        floor: relative L2 that counts as noise here.
    """

    stage: str
    layer: int | None
    step: int
    positions: torch.Tensor
    inputs: torch.Tensor
    expected: torch.Tensor
    got: torch.Tensor
    floor: float
