"""Encoder layers whose products add to the hidden states in place, beside module by module and float64."""

from __future__ import annotations

import pytest
import torch

from ingot.config.encoder_config import StackConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.layers.build_context import BuildContext
from ingot.layers.encoder_blocks.encoder import EncoderLayer, EncoderStack
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from tests.kernels.test_packed_matmul import HALF_DTYPES

SIZE, INNER, ROWS, INPUTS = 64, 256, 30, 3
FUSED = EncoderPass(fused=True)


def stack(dtype: torch.dtype, quant: str = "none", layers: int = 3) -> EncoderStack:
    """Random weights; biases as large as the branches are."""
    config = StackConfig(SIZE, INNER, layers, num_heads=2, norm_eps=1e-5)
    found = EncoderStack(config, BuildContext(QuantConfig(quant), KernelPlan(), dtype))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in found.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            values /= parameter.shape[1] ** 0.5
        parameter.data = (values + ("norm.weight" in name)).to(parameter.dtype)
    return found


def exactly(layers: EncoderStack, hidden: torch.Tensor) -> torch.Tensor:
    """In float64, by the formulas of a pre-norm layer."""
    values = {name: value.double() for name, value in layers.named_parameters()}
    x = hidden.double()
    for index in range(len(layers)):
        w = {name.removeprefix(f"{index}."): v for name, v in values.items() if name.startswith(f"{index}.")}

        def normed(y: torch.Tensor, name: str, w: dict[str, torch.Tensor] = w) -> torch.Tensor:
            centred = y - y.mean(-1, keepdim=True)
            y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return y * w[f"{name}.weight"] + w[f"{name}.bias"]

        def product(y: torch.Tensor, name: str, w: dict[str, torch.Tensor] = w) -> torch.Tensor:
            return y @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

        q, k, v = product(normed(x, "input_layernorm"), "self_attn.qkv_proj").chunk(3, dim=-1)
        q, k, v = (part.reshape(INPUTS, -1, 2, SIZE // 2).transpose(1, 2) for part in (q, k, v))
        shares = (q @ k.transpose(-1, -2) / (SIZE // 2) ** 0.5).softmax(-1)
        x = x + product((shares @ v).transpose(1, 2).reshape(-1, SIZE), "self_attn.o_proj")
        inner = product(normed(x, "post_attention_layernorm"), "mlp.up_proj")
        inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
        x = x + product(inner, "mlp.down_proj")
    return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_as_exact_as_module_by_module(device: str, dtype: torch.dtype) -> None:
    layers = stack(dtype).to(device)
    hidden = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    true = exactly(layers, hidden)
    with torch.inference_mode():
        added, modules = (layers(hidden.clone(), INPUTS, way) for way in (FUSED, MODULE_BY_MODULE))
    errors = [float((y.double() - true).square().mean().sqrt()) for y in (added, modules)]
    assert added.dtype == dtype
    assert not torch.equal(added, modules)
    assert errors[0] < 1.2 * errors[1] < torch.finfo(dtype).eps * 20
    assert (added.double() - true).abs().max() < 3 * (modules.double() - true).abs().max()


def test_what_adds_in_place() -> None:
    """Dense layers in 16 bits that nobody observes."""

    def adds(layers: EncoderStack, way: EncoderPass = FUSED) -> bool:
        layer = layers[0]
        assert isinstance(layer, EncoderLayer)
        return layer.adds_in_place(way)

    half = stack(torch.float16, layers=1)
    assert adds(half)
    assert not adds(half, MODULE_BY_MODULE)
    assert not adds(half, EncoderPass(fused=True, observer=lambda name, value: None))
    assert not adds(stack(torch.float32, layers=1))
    assert not adds(stack(torch.float16, "w8a8", layers=1))


def test_a_layer_that_adds_before_one_that_does_not() -> None:
    """What the first lacks is there before the second begins, and at the end."""
    layers = stack(torch.float16, layers=2)
    first, second = layers
    hidden = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)).half()
    true = exactly(layers, hidden)
    for odd in (first, second):
        odd.adds_in_place = lambda forward_pass: False  # type: ignore[method-assign]
        with torch.inference_mode():
            y = layers(hidden.clone(), INPUTS, FUSED)
        del odd.adds_in_place
        assert (y.double() - true).abs().max() < 0.03
