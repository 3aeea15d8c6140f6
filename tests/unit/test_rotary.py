"""Qwen v1's dynamic NTK: which base a prompt's length chooses, by the formulas of its reference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ingot import LLM, SamplingParams
from ingot.config.decoder_config import RopeConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.rotary import RotaryTable, frequencies
from ingot.models.rope_config import rope_from_hf
from ingot.runtime.step.chosen_products import Forward
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids

SEQ_LENGTH, LONGEST, DIM = 32, 200, 8


def ntk_alpha(length: int, seq_length: int) -> int:
    """``get_ntk_alpha`` of the published model."""
    context = math.log(length / seq_length, 2) + 1
    return max(2 ** math.ceil(context) - 1, 1)


def angles(length: int, seq_length: int, positions: range, dim: int, theta: float) -> torch.Tensor:
    """[positions, dim / 2] fp64 of a prompt of that length."""
    base = theta * ntk_alpha(length, seq_length) ** (dim / (dim - 2))
    turns = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.tensor(positions, dtype=torch.float64), turns)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_every_length_has_the_reference_s_base(theta: float) -> None:
    config = RopeConfig(dim=DIM, theta=theta, scaling="qwen_ntk", original_max=SEQ_LENGTH)
    rope = RotaryTable(config, LONGEST)
    for length in range(1, LONGEST + 1):
        rows = rope.table[rope.offset(length) :][:LONGEST].double()
        expected = angles(length, SEQ_LENGTH, range(LONGEST), DIM, theta)
        torch.testing.assert_close(rows, torch.cat([expected.cos(), expected.sin()], 1), rtol=0, atol=1e-4)
    assert RotaryTable.table_bytes(config, LONGEST) == rope.table.numel() * 4


def test_a_request_keeps_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new tokens take the prompt's base, though they pass the length where another prompt's changes; and
    keys of one base are not reused for a prompt of another that begins alike.
    """
    checkpoint = write_tiny(tmp_path / "qwen", seq_length=SEQ_LENGTH, max_position_embeddings=LONGEST)
    offsets, call = [], Forward.__call__

    def seen(self: Forward, batch: ForwardBatch) -> torch.Tensor:
        offsets.extend((batch.rope_rows - batch.positions).tolist())
        return call(self, batch)

    monkeypatch.setattr(Forward, "__call__", seen)
    found = []
    for reuse in (True, False):
        llm = LLM(checkpoint, "cpu", runtime=RuntimeConfig(block_size=16, prefix_reuse=reuse))
        for section, length in enumerate((SEQ_LENGTH, SEQ_LENGTH + 1, 2 * SEQ_LENGTH + 1)):
            offsets.clear()
            params = SamplingParams(max_new_tokens=SEQ_LENGTH, ignore_eos=True)
            found.append(llm.generate(random_ids(length, seed=1), params)[0].token_ids)
            assert set(offsets) == {section * LONGEST}
    assert found[:3] == found[3:]


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("factor", [4.0, 32.0])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_bent_frequencies_are_those_of_transformers(kind: str, factor: float, dim: int) -> None:
    bounds = {"beta_fast": 32.0, "beta_slow": 1.0}
    if kind == "llama3":
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": factor, **bounds}
    settings["original_max_position_embeddings"] = 2048
    hf = LlamaConfig(head_dim=dim, max_position_embeddings=int(2048 * factor), rope_parameters=settings)
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    rope = rope_from_hf(hf.to_dict(), dim, hf.max_position_embeddings)
    torch.testing.assert_close(frequencies(rope), expected)
    assert rope.attention_factor == pytest.approx(magnitude)
