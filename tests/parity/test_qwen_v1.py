"""A tiny Qwen v1 against plain PyTorch, also beyond the length it was trained at: dynamic NTK and log-n."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ingot import LLM
from tests.e2e.tiny import write_tiny
from tests.measure.align import old_qwen
from tests.tiny_models import random_ids
from tests.unit.test_rotary import angles

SEQ_LENGTH = 32


def attend(self: old_qwen.Attention, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """With the base of the whole prompt, and queries times log(position) to the base of the length."""
    length = x.shape[1]
    q, k, v = self.c_attn(x).view(1, length, 3, old_qwen.HEADS, -1).permute(2, 0, 3, 1, 4)
    dim = q.shape[-1]
    turns = angles(length, SEQ_LENGTH, range(length), dim, 10000.0)

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)

    far = [max(math.log(place, SEQ_LENGTH), 1.0) for place in range(1, length + 1)]
    q = turn(q) * torch.tensor(far, dtype=q.dtype)[:, None]
    out = F.scaled_dot_product_attention(q, turn(k), v, is_causal=True)
    return self.c_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("length", [20, SEQ_LENGTH, SEQ_LENGTH + 1, 2 * SEQ_LENGTH + 1, 150])
def test_logits_of_a_prompt(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_qwen.Attention, "forward", attend)
    checkpoint = write_tiny(tmp_path / "qwen", seq_length=SEQ_LENGTH, max_position_embeddings=200)
    ids = random_ids(length, seed=length, vocab_size=old_qwen.VOCAB)
    with torch.inference_mode():
        expected = old_qwen.load(str(checkpoint)).double()(torch.tensor([ids]))[0]
    found = LLM(checkpoint, "cpu").logits(ids).double()
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
