"""Rotary position tables: the frequencies of every rope scaling, and the cosines and sines that kernels read.

rope = RotaryTable(RopeConfig(dim=128), max_positions=4096)
row = rope.offset(prompt_len) + position
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ingot.config.decoder_config import RopeConfig


class RotaryTable(nn.Module):
    """Cosines and sines of every position, one section of ``max_positions`` rows per base that can occur.

    ``table`` is [sections * max_positions, dim] float32: dim/2 cosines, then dim/2 sines. ``local_table`` is
    the same of ``local``, for the layers that have rotary settings of their own. Neither is stored in an
    engine.
    """

    table: torch.Tensor
    local_table: torch.Tensor | None

    def __init__(self, config: RopeConfig, max_positions: int, local: RopeConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.max_positions = max_positions
        # The bases of Qwen v1's dynamic NTK have alpha 1, 3, 7, 15 …; others have 1 alone.
        alphas = (2.0 ** (s + 1) - 1 for s in range(_section(config, max_positions) + 1))
        sections = [rotary_rows(config, max_positions, alpha) for alpha in alphas]
        self.register_buffer("table", torch.cat(sections), persistent=False)
        own = None if local is None else rotary_rows(local, max_positions)
        self.register_buffer("local_table", own, persistent=False)

    @staticmethod
    def table_bytes(config: RopeConfig, max_positions: int) -> int:
        """Size of ``table``: sections · max_positions · dim · 4."""
        return (_section(config, max_positions) + 1) * max_positions * config.dim * 4

    def offset(self, prompt_len: int) -> int:
        """First row of the section that a request with this many prompt tokens uses throughout."""
        return _section(self.config, prompt_len) * self.max_positions


def _section(config: RopeConfig, prompt_len: int) -> int:
    """The index of the base of a request with this many prompt tokens."""
    if config.scaling != "qwen_ntk" or prompt_len <= config.original_max:
        return 0
    return math.ceil(math.log2(prompt_len / config.original_max))


def rotary_rows(config: RopeConfig, num_positions: int, alpha: float = 1.0) -> torch.Tensor:
    """cos | sin of position · frequency, [num_positions, dim] float32.

    ``alpha`` stretches the base as NTK-aware scaling does: theta · alpha^(dim / (dim - 2)).
    """
    with torch.device("cpu"):
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies(config, alpha))
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * config.attention_factor


def frequencies(config: RopeConfig, alpha: float = 1.0) -> torch.Tensor:
    """Angular frequency of each channel pair, [dim / 2] float32, scaling applied."""
    base = config.theta * alpha ** (config.dim / (config.dim - 2)) if alpha != 1.0 else config.theta
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    plain = 1.0 / base**exponents
    if config.scaling == "linear":
        return plain / config.factor
    if config.scaling == "llama3":  # long waves divided by the factor, short ones kept, a linear ramp between
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = ((config.original_max / (2 * math.pi / plain) - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * plain / config.factor + keep * plain
    if config.scaling == "yarn":
        return _yarn(plain, config)
    return plain


def _yarn(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): interpolate slowly rotating channels, keep fast ones."""

    def channel(rotations: float) -> float:
        turns = config.original_max / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low = max(math.floor(channel(config.beta_fast)), 0)
    high = min(math.ceil(channel(config.beta_slow)), config.dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / config.factor * ramp + plain * (1 - ramp)
