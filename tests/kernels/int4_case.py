"""Random weights of 4 bits inside numbers of 8, over everything that steps and zeros may be.

weight = int4_weight(40, 300, group=128)
"""

from __future__ import annotations

import torch

from ingot.kernels.weight.int4_weight import MOST_STEP, Int4Weight, num_groups, pack_pairs


def allowed_pairs() -> torch.Tensor:
    """Every (step, zero) whose 16 numbers all lie in int8, [pairs, 2]."""
    return torch.tensor(
        [
            (step, zero)
            for step in range(1, MOST_STEP + 1)
            for zero in range(16)
            if zero * step <= 128 and (15 - zero) * step <= 127
        ],
        dtype=torch.uint8,
    )


def int4_weight(
    outputs: int, width: int, group: int, device: str = "cpu", seed: int = 1
) -> tuple[Int4Weight, torch.Tensor]:
    """A weight, and its int8 numbers [N, K] by plain integers."""
    generator = torch.Generator().manual_seed(seed)
    groups, choices = num_groups(width, group), allowed_pairs()
    drawn = choices[torch.randint(len(choices), (groups, outputs), generator=generator)]
    steps, zeros = drawn[..., 0].contiguous(), drawn[..., 1].contiguous()
    numbers = torch.randint(0, 16, (outputs, width), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(outputs, generator=generator) + 0.5) / (73 * width**0.5)
    column = torch.arange(width) // group
    exact = (numbers.long() - zeros.T.long()[:, column]) * steps.T.long()[:, column]
    parts = (pack_pairs(numbers, group, zeros), steps, zeros, scales)
    moved = (part.to(device) for part in parts)
    return Int4Weight(*moved, group, width), exact.to(device)
