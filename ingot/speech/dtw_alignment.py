"""Cross-attention to the times of tokens, by dynamic time warping.

Source: OpenAI's Whisper, ``timing.find_alignment``. Hugging Face crops the frames behind its softmax and
normalises without the prompt's tokens; this file follows the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.errors import EngineError

POSITION_SECONDS = 0.02  # from one encoded position to the next
_MEDIAN = 7  # positions
_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2


def alignment_heads(generation: Mapping[str, Any], config: DecoderConfig) -> list[tuple[int, int]]:
    """(layer, head) of the heads that generation_config.json names, else of all in the upper half of the
    layers. Raises ``EngineError`` if it names something else.
    """
    named = generation.get("alignment_heads")
    if named is None:
        layers = range(config.num_layers // 2, config.num_layers)
        return [(layer, head) for layer in layers for head in range(config.num_heads)]
    sizes = (config.num_layers, config.num_heads)
    good = isinstance(named, list) and all(isinstance(one, list) and len(one) == 2 for one in named)
    pairs = [pair for one in named for pair in zip(one, sizes, strict=True)] if good else []
    if not pairs or not all(type(index) is int and 0 <= index < size for index, size in pairs):
        raise EngineError(
            "alignment_heads of generation_config.json are no heads of this model",
            seen=str(named)[:80],
            allowed=f"pairs [layer below {sizes[0]}, head below {sizes[1]}]",
            fix="build with the generation_config.json of this very checkpoint",
        )
    return [(layer, head) for layer, head in named]


def token_times(scores: torch.Tensor, num_prompt: int) -> np.ndarray:
    """Seconds at which each token after the prompt begins, and the end: float64 [tokens - num_prompt].

    Args:
        scores: before the softmax, float32 [tokens, heads, positions], only of the positions with sound. They
            include the last token of the prompt and the end token: a token's attention is about the next one.
        num_prompt: tokens before the last one of the prompt.
    """
    matrix = smoothed(scores.softmax(-1).transpose(0, 1))[num_prompt:-1]
    rows, positions = warp(-matrix.double().numpy())
    begins = np.diff(rows, prepend=rows[0] - 1).astype(bool)
    return positions[begins] * POSITION_SECONDS


def smoothed(weights: torch.Tensor) -> torch.Tensor:
    """Each position normalised over the tokens, filtered in time, the mean of the heads.

    Args:
        weights: [heads, tokens, positions].

    Returns:
        [tokens, positions].
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    # Where all tokens attend equally, nothing is known.
    normal = torch.where(std > 0, (weights - mean) / std, 0.0)
    return median_filtered(normal).mean(0)


def median_filtered(values: torch.Tensor, width: int = _MEDIAN) -> torch.Tensor:
    """Medians over an odd number of neighbours in the last dimension, mirrored at both ends; values shorter
    than half of them stay.
    """
    reach = width // 2
    if values.shape[-1] <= reach:
        return values
    padded = torch.nn.functional.pad(values, (reach, reach), "reflect")
    return padded.unfold(-1, width, 1).median(-1).values


def warp(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest monotonic path through a matrix of costs [N, M]: rows and columns, from first to last.

    Dynamic time warping, a diagonal at a time. Sums are float32 and equal ones go right, as in the original.
    """
    rows, columns = cost.shape
    steps = np.full((rows + 1, columns + 1), _RIGHT, dtype=np.int8)
    steps[1:, 0] = _DOWN
    before = np.full(rows + 1, np.inf, dtype=np.float32)  # the diagonal before the last, by row
    before[0] = 0
    last = np.full(rows + 1, np.inf, dtype=np.float32)
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        slant, down, right = before[i - 1], last[i - 1], last[i]
        by_slant, by_down = (slant < down) & (slant < right), (down < slant) & (down < right)
        steps[i, j] = np.where(by_slant, _DIAGONAL, np.where(by_down, _DOWN, _RIGHT))
        least = np.where(by_slant, slant, np.where(by_down, down, right))
        now = np.full(rows + 1, np.inf, dtype=np.float32)
        now[i] = cost[i - 1, j - 1] + least
        before, last = last, now
    path = []
    row, column = rows, columns
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = steps[row, column]
        row, column = row - (step != _RIGHT), column - (step != _DOWN)
    path_rows, path_columns = np.array(path[::-1]).T
    return path_rows, path_columns
