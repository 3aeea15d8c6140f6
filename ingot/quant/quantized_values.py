"""Quantized weights as rounding, GPTQ and RPTQ choose them, before a scheme packs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [N, K] in few bits: W ≈ (q - zero) · scale.

    Attributes:
        values: [N, K] int8 (8 bits symmetric), uint8 or e4m3.
        scales: [N], or [groups, N] where ``group`` is not 0; in the dtype in which they are stored. May be
            negative.
        zeros: uint8 of the shape of ``scales``; None where values are symmetric: 0 of int8, 8 of 4 bits.
        group: columns that share a scale; the last group may be shorter. 0: the whole row.
        order: int32 [K] where column j of ``values`` is the weight's column ``order[j]``; None: by column.
        units: fp32 [N] where a row's scales are whole multiples of one value (two_level_scales.py).
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    order: torch.Tensor | None = None
    units: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A weight in 8 bits, and the scales of its input's blocks of reordered channels.

    Attributes:
        values: int8 [N, K], column j of channel ``order[j]``.
        scales: fp32 [N].
        input_scales, input_zeros: fp32 [blocks], of the input's channels in that order.
        order: int64 [K]; None: channels come in order.
    """

    values: torch.Tensor
    scales: torch.Tensor
    input_scales: torch.Tensor
    input_zeros: torch.Tensor
    order: torch.Tensor | None = None

    def shift(self, block: int) -> torch.Tensor:
        """What zeros add to the outputs: -Σ scale · zero · Σ W over each block, fp64 [N]."""
        sums = [part.double().sum(1) for part in self.values.split(block, dim=1)]
        factors = self.input_scales.double() * self.input_zeros.double()
        return -(torch.stack(sums, dim=1) @ factors) * self.scales.double()


Values = Quantized | InBlocks
