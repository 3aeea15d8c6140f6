"""The checking decoder against PyTorch's own operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ingot.config.decoder_config import DecoderConfig
from ingot.reference.plain_layer import NormSpec, PlainAttention, bend, plain_attention

CONFIG = DecoderConfig("llama", 64, 32, 64, 1, 4, 2, 8, 128)
POSITIONS = torch.arange(6, 9)


def attention(**changes: object) -> PlainAttention:
    return plain_attention(replace(CONFIG, **changes), 0, "self_attn", torch.ones, POSITIONS, None)  # type: ignore[arg-type]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


@pytest.mark.parametrize("window", [0, 4])
def test_attention_is_that_of_positions_however_many_keys_it_is_given(window: int) -> None:
    """A run that reads a token too many must not take the reference with it."""
    query, key, value = normal(3, 4, 8), normal(11, 2, 8), normal(11, 2, 8)
    distance = POSITIONS[:, None] - torch.arange(11)
    seen = (distance >= 0) & (distance < (window or 11))
    heads = (part.transpose(0, 1) for part in (query, key, value))
    expected = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(0, 1)
    found = attention(sliding_window=window).attend(query, key, value, POSITIONS)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms(kind: str) -> None:
    x, weight, bias = normal(5, 32), normal(32), normal(32) if kind == "layer_norm" else None
    found = NormSpec("norm", weight, bias, 1e-5, kind).run(x)  # type: ignore[arg-type]
    if bias is None:
        expected = F.rms_norm(x, (32,), weight, 1e-5)
    else:
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_in_16_bits_rounds_where_the_kernels_do(wide: bool) -> None:
    """Before its weight and after it; a wide one once."""
    x, weight = normal(5, 32).bfloat16().float(), normal(32).bfloat16().float()
    found = NormSpec("norm", weight, None, 1e-5, "rms_norm", wide=wide).run(x, lambda y: y.bfloat16().float())
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    once = (normed * weight).bfloat16().float()
    twice = (normed.bfloat16().float() * weight).bfloat16().float()
    assert not torch.equal(once, twice)
    assert torch.equal(found, once if wide else twice)


def test_activations() -> None:
    x = normal(400)
    for name, expected in {"silu": F.silu(x), "relu": F.relu(x), "gelu": F.gelu(x), "none": x}.items():
        torch.testing.assert_close(bend(x, name), expected, rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]
