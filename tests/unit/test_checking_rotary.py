"""Two computations of rotary positions that share no code give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.config.decoder_config import RopeConfig
from ingot.layers.rotary import RotaryTable
from ingot.reference.plain_rotary import plain_section, plain_turns

LENGTH = 1200
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max": 256}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"scaling": "linear", "factor": 4.0},
    "llama3": {"scaling": "llama3", **LLAMA3},
    "yarn": {"scaling": "yarn", "factor": 4.0, "original_max": 300, "attention_factor": 1.14},
    "qwen_ntk": {"scaling": "qwen_ntk", "original_max": 200},
}


@pytest.mark.parametrize("dim", [8, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 31234.0, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling(scaling: str, theta: float, dim: int) -> None:
    rope = RopeConfig(dim=dim, theta=theta, **SCALINGS[scaling])
    table = RotaryTable(rope, LENGTH)
    for length in (1, 199, 200, 201, 400, 401, LENGTH):
        section, positions = plain_section(rope, length), torch.arange(length)
        assert table.offset(length) == section * LENGTH
        turns = plain_turns(rope, positions, torch.full((length,), section))
        assert torch.equal(torch.cat(turns, dim=-1), table.table[section * LENGTH :][:length])


def test_requests_of_other_lengths_side_by_side() -> None:
    rope = RopeConfig(dim=8, **SCALINGS["qwen_ntk"])
    positions, sections = torch.tensor([5, 7, 300]), torch.tensor([0, 2, 1])
    cos, _ = plain_turns(rope, positions, sections)
    for row, (position, section) in enumerate(zip(positions, sections, strict=True)):
        alone, _ = plain_turns(rope, position[None], section[None])
        assert torch.equal(cos[row], alone[0])
    assert plain_section(None, 5000) == 0
