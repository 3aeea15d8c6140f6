"""Rotary cosines and sines of the reference decoder; shares nothing with layers/rotary.py."""

from __future__ import annotations

import math

import torch

from ingot.config.decoder_config import RopeConfig


def plain_turns(
    rope: RopeConfig, positions: torch.Tensor, sections: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, dim / 2], fp32 on the CPU, of tokens at ``positions`` [T].

    Frequencies and angles are rounded to fp32, as in the original.

    Args:
        sections: [T], how often the base was doubled for each token's request (``plain_section``).
    """
    where, own = positions.cpu(), sections.cpu()
    angles = torch.empty(len(where), rope.dim // 2)
    for section in own.unique().tolist():
        rows = own == section
        angles[rows] = where[rows].float()[:, None] * _inverse_wavelengths(rope, section)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def plain_section(rope: RopeConfig | None, prompt_len: int) -> int:
    """How many doublings of its training length a prompt needs; 0 where the base does not depend on it."""
    section = 0
    if rope is not None and rope.scaling == "qwen_ntk":
        while prompt_len > rope.original_max << section:
            section += 1
    return section


def _inverse_wavelengths(rope: RopeConfig, section: int) -> torch.Tensor:
    """Radians per position of each pair of channels, [dim / 2] fp32."""
    theta = rope.theta
    if section:
        stretch = 2 ** (section + 1) - 1
        theta *= float(stretch) ** (rope.dim / (rope.dim - 2))
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    turning = theta ** (2 * pairs / rope.dim)
    inverse = turning.reciprocal()
    match rope.scaling:
        case "linear":
            return inverse / rope.factor
        case "llama3":
            wave = 2 * math.pi / inverse
            share = (rope.original_max / wave - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            between = (1 - share) * inverse / rope.factor + share * inverse
            return torch.where(share <= 0, inverse / rope.factor, torch.where(share >= 1, inverse, between))
        case "yarn":
            first, last = (  # the pairs that turn so often over the training length
                -math.log(2 * math.pi * turns / rope.original_max) / math.log(rope.theta) * rope.dim / 2
                for turns in (rope.beta_fast, rope.beta_slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), rope.dim - 1)
            slow = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
            return slow * (inverse / rope.factor) + (1 - slow) * inverse
    return inverse
