"""Attention that is known gives the times that follow from it, by a path that a plain loop finds too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.errors import EngineError
from ingot.speech.dtw_alignment import alignment_heads, median_filtered, smoothed, token_times, warp

CONFIG = DecoderConfig(
    "whisper", 100, 48, 64, 4, 6, 6, 8, 448, norm="layer_norm", mlp="gelu", wiring="cross",
    encoder=EncoderConfig(48, 1500, (80, 0), 100, "speech"),
)  # fmt: skip


def peaked(begins: list[int], positions: int, heads: int = 2) -> torch.Tensor:
    """Scores of tokens that attend to where the next one begins: [tokens, heads, positions]."""
    scores = torch.zeros(len(begins), heads, positions)
    for row, begin in enumerate(begins):
        end = begins[row + 1] if row + 1 < len(begins) else positions
        scores[row, :, begin : max(end, begin + 1)] = 8.0
    return scores


def test_tokens_begin_where_they_are_attended_to() -> None:
    begins = [0, 20, 55, 90, 140]
    prompt = torch.zeros(2, 2, 200)
    scores = torch.cat([prompt, peaked(begins, 200), torch.zeros(1, 2, 200)])
    found = token_times(scores, num_prompt=2)
    assert found == pytest.approx([0.02 * begin for begin in begins], abs=0.04)


def plain_path(cost: np.ndarray) -> list[tuple[int, int]]:
    """The cheapest path cell by cell, as the original prefers among equals."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            slant, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if slant < down and slant < right:
                before = i - 1, j - 1
            elif down < slant and down < right:
                before = i - 1, j
            else:
                before = i, j - 1
            came[i, j] = before
            total[i, j] = cost[i - 1, j - 1] + total[before]
    path, at = [], (rows, columns)
    while at != (0, 0):
        path.append((at[0] - 1, at[1] - 1))
        at = came[at]
    return path[::-1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 40), (40, 5), (17, 60)])
@pytest.mark.parametrize("levels", [1, 2, 1000])
def test_the_path_is_the_one_of_a_plain_loop(shape: tuple[int, int], levels: int) -> None:
    cost = np.random.default_rng(shape[0] * levels).integers(-levels, levels + 1, shape) / levels  # few: ties
    rows, columns = warp(cost)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == plain_path(cost)


def test_medians_are_mirrored_at_the_ends() -> None:
    values = torch.tensor([5.0, 1.0, 9.0, 2.0, 8.0, 3.0])
    mirrored = [2.0, 9.0, 1.0, *values.tolist(), 8.0, 2.0, 9.0]
    wanted = [sorted(mirrored[i : i + 7])[3] for i in range(6)]
    assert median_filtered(values[None])[0].tolist() == wanted
    assert median_filtered(values[None, :3])[0].tolist() == values[:3].tolist()


def test_heads_that_tell_nothing_are_no_numbers_that_spread() -> None:
    weights = torch.full((2, 4, 10), 0.1)
    weights[1] = torch.rand(4, 10, generator=torch.Generator().manual_seed(0))
    assert bool(smoothed(weights).isfinite().all())


def test_heads_are_those_of_the_checkpoint_or_the_upper_layers() -> None:
    named = {"alignment_heads": [[2, 2], [3, 0]]}
    assert alignment_heads(named, CONFIG) == [(2, 2), (3, 0)]
    assert alignment_heads({}, CONFIG) == [(layer, head) for layer in (2, 3) for head in range(6)]


@pytest.mark.parametrize(("layers", "first"), [(1, 0), (2, 1), (3, 1), (5, 2), (6, 3)])
def test_the_middle_layer_of_an_odd_number_is_an_upper_one(layers: int, first: int) -> None:
    """As in the original: ``n_text_layer // 2`` and those behind it."""
    found = alignment_heads({}, replace(CONFIG, num_layers=layers))
    assert found == [(layer, head) for layer in range(first, layers) for head in range(6)]


@pytest.mark.parametrize("named", [[], [[4, 0]], [[0, 6]], [[-1, 0]], [[1]], [[True, 1]], "0 1", [[0.0, 1]]])
def test_heads_that_the_model_lacks_are_named(named: Any) -> None:
    with pytest.raises(EngineError, match="layer below 4, head below 6"):
        alignment_heads({"alignment_heads": named}, CONFIG)


def test_probabilities_of_a_softmax_matter_not_of_what_was_cropped() -> None:
    """Padding behind the sound may draw all attention: the softmax is over the sound alone."""
    scores = torch.cat([torch.zeros(1, 2, 100), peaked([0, 30, 60], 100), torch.zeros(1, 2, 100)])
    padded = torch.cat([scores, torch.full((5, 2, 50), 60.0)], dim=-1)
    assert token_times(padded[:, :, :100], 1) == pytest.approx(token_times(scores, 1))
    assert not math.isnan(float(token_times(padded, 1).sum()))
