"""Schemes on the pocket model: which beats which, by KL on prompts that were not calibrated with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Load, Walk
from ingot.building.calibration.calibration_data import read_calibration_data
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.engine_text import read_text_parts
from ingot.layers.decoder import Decoder
from ingot.quant.methods.activation_statistics import InputStatistics
from ingot.quant.methods.awq import search_scales
from ingot.quant.methods.channel_folding import fold_into_columns, fold_into_norm
from ingot.quant.methods.gptq import gptq
from ingot.quant.methods.rounding import dequantize, quantize
from ingot.quant.methods.smoothquant import fake_per_channel, fake_per_token, search_smoothing
from tests.quant.inputs import shrunk
from tests.quant.models import CPU, divergence, log_probs, opened

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
NORMS = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}
LOUD, GAIN = (3, 77, 200), 60.0

Layer = CalibratedLayer[InputStatistics]
Choose = Callable[[Layer, str], Mapping[str, torch.Tensor]]


@dataclass
class Pocket:
    """The pocket model, samples to calibrate with and others to measure on."""

    decoder: Decoder
    load: Load
    seen: list[tuple[int, ...]]
    unseen: list[tuple[int, ...]]

    def divergences(self, *ways: Choose, tokens: bool = False) -> list[float]:
        """KL of the model that each way makes of the products; ``tokens``: with int8 activations."""
        changes: list[dict[str, torch.Tensor]] = [{} for _ in ways]

        def statistic(name: str, size: int) -> InputStatistics:
            return InputStatistics.of(size, hessian=True, sample=256)

        walk = Walk(self.decoder, self.load, self.seen, CPU, statistic)
        for own_layer in walk.layers:
            layer = walk.observe(own_layer)
            for name in layer.inputs:
                for own, choose in zip(changes, ways, strict=True):
                    own |= choose(layer, name)
            walk.advance(layer)
        exact = log_probs(self.decoder, self.load, self.unseen)
        fake = (lambda name, x: x if name == "lm_head" else fake_per_token(x)) if tokens else None
        found = (log_probs(self.decoder, self.load, self.unseen, own, fake) for own in changes)
        return [divergence(exact, near) for near in found]


def make_pocket(load_of: Callable[[Load], Load], samples: int) -> Pocket:
    decoder, load = opened(POCKET, 512)
    text = read_text_parts(open_checkpoint(POCKET))
    data = read_calibration_data(
        ROOT / "recipes" / "heldout.jsonl", text.tokenizer, text.chat, samples=samples
    )
    return Pocket(decoder, load_of(load), list(data.samples[::2]), list(data.samples[1::2]))


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return make_pocket(lambda load: load, 32)


@pytest.fixture(scope="module")
def loud_pocket() -> Pocket:
    """The same function with some channels after each norm much louder, as large models have them."""

    def louder(load: Load) -> Load:
        def loaded(name: str) -> torch.Tensor:
            tensor = load(name).clone()
            factors = torch.ones(256)
            factors[list(LOUD)] = GAIN
            if name.endswith("layernorm.weight"):
                return tensor * factors
            return tensor / factors if any(name.endswith(f"{kind}.weight") for kind in NORMS) else tensor

        return loaded

    return make_pocket(louder, 16)


def norm_before(layer: Layer, name: str) -> str | None:
    """The weight of the norm that a product reads; None where it reads something else."""
    found = (norm for kind, norm in NORMS.items() if name.endswith(kind))
    return next((f"{layer.name}.{norm}.weight" for norm in found), None)


def rounded(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    weight = f"{name}.weight"
    return {weight: dequantize(quantize(layer.weight(weight), 4, 128))}


def compensated(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    weight, seen = f"{name}.weight", layer.inputs[name].hessian
    assert seen is not None
    found = gptq(layer.weight(weight), seen.mean(), 4, 128, act_order=True, static_groups=True)
    return {weight: dequantize(found.quantized)}


def clipped(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    weight, seen = f"{name}.weight", layer.inputs[name].hessian
    assert seen is not None
    loudness = seen.mean().diagonal()
    return {weight: dequantize(shrunk(layer.weight(weight), 4, 128, loudness))}


def scaled(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    """AWQ before the products that follow a norm, rounding elsewhere."""
    norm = norm_before(layer, name)
    seen = layer.inputs[name].sample
    if norm is None:
        return rounded(layer, name)
    assert seen is not None
    weight = layer.weight(f"{name}.weight")
    found = search_scales([weight], seen.x, lambda w: dequantize(quantize(w, 4, 128)), group=128, steps=10)
    near = dequantize(quantize(fold_into_columns(weight, found.scales), 4, 128))
    return {norm: fold_into_norm(layer.weight(norm), found.scales)[0], f"{name}.weight": near}


def channels(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": fake_per_channel(layer.weight(f"{name}.weight"))}


def smoothed(layer: Layer, name: str) -> dict[str, torch.Tensor]:
    """SmoothQuant before the products that follow a norm."""
    norm = norm_before(layer, name)
    seen = layer.inputs[name].sample
    if norm is None:
        return channels(layer, name)
    assert seen is not None
    weight = layer.weight(f"{name}.weight")
    scales = search_smoothing([weight], seen.x, act_max=layer.inputs[name].ranges.absmax()).scales
    near = fake_per_channel(fold_into_columns(weight, scales))
    return {norm: fold_into_norm(layer.weight(norm), scales)[0], f"{name}.weight": near}


@pytest.mark.slow  # of GPTQ, test_calibrated.py has the verb on the same model
def test_four_bits(pocket: Pocket) -> None:
    plain, narrow, best = pocket.divergences(rounded, clipped, compensated)
    assert best < 0.9 * narrow
    assert best < 0.75 * plain
    assert narrow < 0.9 * plain
    assert plain < 0.01


@pytest.mark.slow
def test_awq_beats_rounding_where_channels_are_loud(loud_pocket: Pocket) -> None:
    plain, best = loud_pocket.divergences(rounded, scaled)
    assert best < 0.75 * plain


@pytest.mark.slow
def test_smoothing_beats_none_where_channels_are_loud(loud_pocket: Pocket) -> None:
    plain, best = loud_pocket.divergences(channels, smoothed, tokens=True)
    assert best < 0.1 * plain
