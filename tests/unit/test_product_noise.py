"""The bound on a product's rounding at later places is never below the actual effect."""

from __future__ import annotations

import pytest
import torch

from ingot.proof.product_noise import ProductNoise
from ingot.reference.plain_layer import Activation, bend, rotated

T, HEADS, KV_HEADS, D = 9, 4, 2, 8
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).double()


def moved(noise: torch.Tensor) -> torch.Tensor:
    """An error of a product: some signs of its noise."""
    return 1e-6 * noise * torch.sign(normal(*noise.shape))


def kept(product: str, output: torch.Tensor, noise: torch.Tensor) -> ProductNoise:
    found = ProductNoise()
    found.keep(product, output, 1e-6 * noise)
    return found


def test_queries_keys_and_values_have_their_own_columns() -> None:
    output, noise = normal(T, (HEADS + 2 * KV_HEADS) * D), normal(T, (HEADS + 2 * KV_HEADS) * D).abs()
    found = kept("layers.0.self_attn.qkv_proj", output, noise)
    angle = normal(T, 1, D // 2)
    sizes = [HEADS * D, KV_HEADS * D, KV_HEADS * D]
    both = zip(output.split(sizes, -1), (output + moved(noise)).split(sizes, -1), strict=True)
    for place, pair in zip(("query", "keys", "values"), both, strict=True):
        right, off = (part.unflatten(-1, (-1, D)) for part in pair)
        if place != "values":
            right, off = (3 * rotated(part, angle.cos(), angle.sin()) for part in (right, off))
        taken = found.take(place, right)
        assert taken is not None
        assert taken.shape == right.shape
        assert float(((off - right).abs() / taken).max()) <= 1.42  # a turn adds two channels: sqrt(2)
        assert float(((off - right).abs() / taken).max()) > 0.5
    assert found.take("query", output) is None  # once


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation: Activation, gated: bool) -> None:
    output, noise = 3 * normal(T, 4000), normal(T, 4000).abs()

    def inner(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return bend(gate, activation) * up if gated else bend(x, activation)

    right, off = inner(output), inner(output + moved(noise))
    product = "layers.1.mlp.gate_up_proj" if gated else "layers.1.mlp.up_proj"
    taken = kept(product, output, noise).take("inner", right)
    assert taken is not None
    shares = (off - right).abs() / taken
    assert 0.8 < float(shares.max()) <= 1.001


def test_a_norm_behind_a_branch_scales_each_value() -> None:
    output, noise, weight = normal(T, 64), normal(T, 64).abs(), normal(64)
    change = output * weight / output.square().mean(-1, keepdim=True).sqrt()
    taken = kept("layers.1.mlp.down_proj", output, noise).take("stream", change)
    assert taken is not None
    assert torch.allclose(taken, 1e-6 * noise * (change / output).abs())


@pytest.mark.parametrize("product", ["encoder.projector", "encoder.qformer.layers.0.encoder_attn.kv_proj"])
def test_a_product_without_a_layer_is_its_own_place(product: str) -> None:
    output, noise = normal(T, 6), normal(T, 6).abs()
    found = kept(product, output, noise)
    assert found.take("stream", output) is None
    taken = found.take(product, output)
    assert taken is not None
    assert torch.equal(taken, 1e-6 * noise)
