"""The first place where an engine leaves the original, and what explains it.

Owns the two records that align's parts hand to each other. Knows neither how a difference is found nor how it
is explained.

    for finding in explain(divergence, model, config): print(finding.text)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """One stage whose output is not the reference's.

    Attributes:
        stage: ``layers.3.input_norm``, ``.attention``, ``.residual`` (the stream after attention),
            ``.post_norm``, ``.mlp``, ``.output`` (the stream after the MLP);
            ``layers.3`` (the layer as a whole), ``embedding``, ``final_norm``, ``logits``, ``prompt``,
            ``ids`` or ``greedy``.
        layer: its number; None outside layers.
        step: 0 for the prompt, then one for each token fed.
        positions: [T] positions of the tokens.
        inputs: the reference's input of that stage's module, [T, hidden]; for attention in a cached step the
            inputs of all tokens so far, [S, hidden]; for a sum (``.residual``, ``.output``) the branch that
            joins the stream; for the embedding the ids, [T].
        expected: the reference's output, [T, ...].
        got: the engine's output, [T, ...].
        floor: relative L2 difference that counts as noise here.
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
    """A variant that explains a divergence.

    Attributes:
        culprit: its name, stable between versions.
        before: relative L2 difference to the expected output without the variant.
        after: the same with it.
        text: one sentence for people.
    """

    culprit: str
    before: float
    after: float
    text: str
