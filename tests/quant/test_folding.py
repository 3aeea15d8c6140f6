"""What AWQ and SmoothQuant fold into a model: the same outputs, the paper's weights, what was seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot import LLM
from ingot.building.calibration.calibrate import CalibratedLayer, Load
from ingot.building.calibration.calibrate import Held as HeldLayer
from ingot.building.calibration.rescaling import fold, rescaling_sites
from ingot.building.calibration.smooth_layers import SmoothLayers
from ingot.building.source.folded_values import _least_squares
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly
from ingot.layers.linear import linears
from ingot.quant.methods.activation_statistics import InputStatistics
from tests.quant.conftest import Made
from tests.quant.models import CPU, log_probs, opened, planned
from tests.tiny_models import random_ids, save_model, tiny_config

SMOOTH = QuantConfig("w8a8", method="smoothquant")
KINDS = ("llama", "qwen2", "qwen3", "gpt2", "relu", "tied", "qwen")


class Held:
    """A checkpoint's tensors that can be replaced."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.changes: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> torch.Tensor:
        return self.changes[name] if name in self.changes else self._load(name)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.shape == self._load(name).shape
        self.changes[name] = tensor


@pytest.mark.parametrize("kind", KINDS)
def test_factors_at_every_site_change_no_output(checkpoints: dict[str, Path], kind: str) -> None:
    """Random ones, in every layer; with heads that share values, biases, ReLU."""
    decoder, load = opened(checkpoints[kind])
    held = Held(load)
    generator = torch.Generator().manual_seed(1)
    for index in range(len(decoder.layers)):
        own = rescaling_sites(decoder.config, f"layers.{index}")
        assert len(own) == (3 if kind == "gpt2" else 4)
        for site in own:
            size = held.weight(f"{site.reader}.weight").shape[1]
            scales = torch.exp(torch.randn(size, generator=generator))
            if site.classes is not None:
                scales = scales[: int(site.classes.max()) + 1][site.classes]
            fold(site, scales, held)
    ids = [random_ids(20), random_ids(9, seed=5)]
    exact = log_probs(decoder, load, ids)
    torch.testing.assert_close(log_probs(decoder, load, ids, held.changes), exact, rtol=1e-4, atol=1e-4)
    one = dict(list(held.changes.items())[:1])
    assert not torch.allclose(log_probs(decoder, load, ids, one), exact, rtol=1e-2, atol=1e-2)


def smoothed(
    assembly: Assembly, load: Load, index: int, seen: dict[str, InputStatistics]
) -> CalibratedLayer[InputStatistics]:
    """A layer as the class that builds use leaves it."""
    layer = CalibratedLayer(f"layers.{index}", seen, HeldLayer(load, CPU))
    assert not list(SmoothLayers(assembly, CPU).choose(layer)), "no input is static"
    return layer


def seen_of(decoder: torch.nn.Module, load: Load) -> Iterator[dict[str, InputStatistics]]:
    """What the samples give each layer, gathered by a feed of its own."""
    found: dict[str, InputStatistics] = {}

    def feed(name: str, x: torch.Tensor) -> torch.Tensor:
        found.setdefault(name, InputStatistics.of(x.shape[1], sample=64)).add(x)
        return x

    log_probs(decoder, load, [random_ids(60, seed=n) for n in range(12)], feed=feed)  # type: ignore[arg-type]
    for index in (0, 1):
        yield {name: seen for name, seen in found.items() if name.startswith(f"layers.{index}.")}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen"])
def test_smoothing_alone_changes_no_output(checkpoints: dict[str, Path], kind: str) -> None:
    """The smoothed weights, before any is rounded, compute what the checkpoint does."""
    decoder, load = opened(checkpoints[kind], 128)
    assembly = planned(checkpoints[kind], SMOOTH.replace(alpha=0.8))
    changes: dict[str, torch.Tensor] = {}
    for index, seen in enumerate(seen_of(decoder, load)):
        layer = smoothed(assembly, load, index, seen)
        names = [n for n, _ in decoder.named_parameters() if n.startswith(f"layers.{index}.")]
        changes |= {name: layer.weight(name).float() for name in names}
    moved = {n.rpartition(".")[0] for n, t in changes.items() if not torch.equal(t, load(n).float())}
    ids = [random_ids(40, seed=7)]
    exact = log_probs(decoder, load, ids)
    torch.testing.assert_close(log_probs(decoder, load, ids, changes), exact, rtol=1e-4, atol=1e-4)
    assert {"layers.0.input_layernorm", "layers.0.self_attn.o_proj"} <= moved
    assert ("layers.0.mlp.down_proj" in moved) == (kind != "gpt2")  # a GELU lies before it


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_norm_and_columns_are_the_paper_s(golden: Path, alpha: float, tmp_path: Path) -> None:
    """The authors' scales and folded weights, by the class that builds use."""
    with np.load(golden / "quant" / "smoothquant_scales.npz", allow_pickle=False) as file:
        given = {part: torch.from_numpy(file[part]) for part in file.files}
    shape = {"hidden_size": 96, "head_dim": 26, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_model(tiny_config("llama", **shape), tmp_path, seed=1)
    decoder, load = opened(tmp_path, 128)
    own = {
        "layers.0.input_layernorm.weight": given["rms_weight"],
        "layers.0.self_attn.qkv_proj.weight": torch.cat([given[f"weight{i}"] for i in range(3)]),
    }
    seen = next(seen_of(decoder, load))
    loud = InputStatistics.of(96)
    loud.add(given["act_max"][None])
    assembly = planned(tmp_path, SMOOTH.replace(alpha=alpha))
    seen |= {"layers.0.self_attn.qkv_proj": loud}
    layer = smoothed(assembly, lambda n: own.get(n, load(n)), 0, seen)
    norm, columns = (layer.weight(name) for name in own)
    alive = given["act_max"] > 1e-5
    reported = f"rms_a{alpha}_"
    torch.testing.assert_close(
        norm[alive], given[reported + "norm_weight_after"][alive], rtol=1e-6, atol=1e-7
    )
    assert torch.equal(norm[~alive], given["rms_weight"][~alive])
    expected = given[reported + "weight0_after"][:, alive]
    torch.testing.assert_close(columns[:80, alive], expected, rtol=1e-5, atol=1e-7)


def test_a_static_scale_is_the_largest_magnitude_that_was_seen(
    checkpoints: dict[str, Path], made: Made
) -> None:
    quant = QuantConfig("w8a8", activations="static")
    found = linears(LLM(made("llama", quant, dtype="fp32", calib_samples=12), "cpu").engine.model)
    for layer in seen_of(*opened(checkpoints["llama"], 128)):
        for name, seen in layer.items():
            scale = float(found[name].input_scale)  # type: ignore[arg-type]
            assert scale == pytest.approx(float(seen.ranges.absmax().amax()) / 127, rel=1e-5)


def test_a_norm_s_rounding_costs_nothing(checkpoints: dict[str, Path]) -> None:
    """In bf16 a norm's weight is off by up to 0.4 %: the columns take that up."""
    decoder, load = opened(checkpoints["llama"], 128)
    assembly = planned(checkpoints["llama"], SMOOTH, "bf16")
    layer = smoothed(assembly, load, 0, next(seen_of(decoder, load)))
    name = "layers.0.input_layernorm.weight"
    norm = assembly.cast(name, layer.weight(name))
    assert norm.dtype == torch.bfloat16
    columns = layer.weight("layers.0.self_attn.qkv_proj.weight")
    exact = load("layers.0.self_attn.qkv_proj.weight") * load("layers.0.input_layernorm.weight")
    rows = slice(0, 48)  # queries and keys; values are divided by the output's scales
    torch.testing.assert_close((columns * norm.float())[rows], exact[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("columns", "part"), [(32, 1.0), (32, 0.8), (64, 0.6), (64, 0.5), (256, 0.5)])
def test_factors_are_found_also_of_rows_with_clipped_values(columns: int, part: float) -> None:
    """In 4 bits over ``part`` of a row's range; each row's factor is within its own limit."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(2000, columns, generator=generator)
    factors = torch.exp(torch.randn(2000, generator=generator) / 2)
    meant = weight * factors[:, None]
    scales = meant.abs().amax(1, keepdim=True) * part / 8
    stored = (meant / scales).round().clamp(-8, 7) * scales
    found = _least_squares(weight, stored, scales.expand_as(meant))
    off = (found.values / factors - 1).abs()
    assert (off <= found.uncertain).all()
    assert float(found.uncertain.median()) < 0.15


def test_values_of_another_row_say_nothing_of_a_factor() -> None:
    weight, scales = (
        torch.randn(50, 64, generator=torch.Generator().manual_seed(5)),
        torch.full((50, 64), 0.5),
    )
    found = _least_squares(weight, ((weight.roll(1, 0)) / 0.5).round() * 0.5, scales)
    assert float(found.uncertain.min()) > 0.3
