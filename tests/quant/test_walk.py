"""The walk over a model: what products multiply, as Hugging Face's own modules see it."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ingot.building.calibration.calibrate import Walk
from ingot.errors import BuildError, ConfigError
from tests.quant.models import layers_of, opened
from tests.tiny_models import random_ids, save_model, tiny_config

CPU = torch.device("cpu")
SAMPLES = [random_ids(n, seed=n) for n in (9, 30, 1, 17)]
THEIRS = {  # the module of Hugging Face that reads the same input
    "self_attn.qkv_proj": ("self_attn.q_proj", "attn.c_attn"),
    "self_attn.o_proj": ("self_attn.o_proj", "attn.c_proj"),
    "mlp.gate_up_proj": ("mlp.up_proj", ""),
    "mlp.up_proj": ("", "mlp.c_fc"),
    "mlp.down_proj": ("mlp.down_proj", "mlp.c_proj"),
}


class Kept:
    """All tokens of an input."""

    def __init__(self, name: str = "", in_features: int = 0) -> None:
        self.parts: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        self.parts.append(x.clone())

    @property
    def x(self) -> torch.Tensor:
        return torch.cat(self.parts)


@pytest.fixture(params=["llama", "qwen3", "gpt2"], scope="module")
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("tiny") / request.param
    return save_model(tiny_config(request.param), folder, seed=5), folder


@torch.no_grad()
def seen_by_huggingface(model: PreTrainedModel, layer: int) -> dict[str, torch.Tensor]:
    """Inputs of one layer's products over all samples, by our names."""
    gpt2 = hasattr(model, "transformer")
    block = (model.transformer.h if gpt2 else model.model.layers)[layer]
    found: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for ours, names in THEIRS.items():
        name = names[int(gpt2)]
        if name:
            rows = found.setdefault(f"layers.{layer}.{ours}", [])
            hook = lambda module, args, rows=rows: rows.append(args[0][0])  # noqa: E731
            hooks.append(block.get_submodule(name).register_forward_pre_hook(hook))
    for ids in SAMPLES:
        model(torch.tensor([ids]))
    for one in hooks:
        one.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


def test_inputs_are_those_of_huggingface(tiny: tuple[PreTrainedModel, Path]) -> None:
    model, (decoder, load) = tiny[0], opened(tiny[1])
    reported: list[tuple[int, int]] = []
    loads: Counter[str] = Counter()

    def counted(name: str) -> torch.Tensor:
        loads[name] += 1
        return load(name)

    progress = lambda what, done, total: reported.append((done, total))  # noqa: E731
    walk = Walk(decoder, counted, SAMPLES, CPU, Kept, batch_tokens=32, progress=progress)
    layers = list(layers_of(walk))
    assert [layer.name for layer in layers] == ["layers.0", "layers.1"]
    for layer in layers:
        expected = seen_by_huggingface(model, int(layer.name[-1]))
        assert layer.inputs.keys() == expected.keys()
        for name, kept in layer.inputs.items():
            torch.testing.assert_close(kept.x, expected[name], rtol=1e-4, atol=1e-4)
    assert reported[-1] == (2 * 57, 2 * 57)
    assert set(loads.values()) == {1}
    assert not any(name.startswith(("lm_head", "norm")) for name in loads)


@pytest.mark.parametrize("propagate", [False, True])
def test_what_a_layer_was_given_shows_in_the_next(
    tiny: tuple[PreTrainedModel, Path], propagate: bool
) -> None:
    """A bent down product and a bent input of the output product, against the same done to the original."""
    model, (decoder, load) = tiny[0], opened(tiny[1])
    gpt2 = hasattr(model, "transformer")
    first = (model.transformer.h if gpt2 else model.model.layers)[0]
    products = (
        (first.attn.c_proj, first.mlp.c_proj) if gpt2 else (first.self_attn.o_proj, first.mlp.down_proj)
    )
    walk = Walk(decoder, load, SAMPLES, CPU, Kept, propagate=propagate, batch_tokens=20)
    layer = walk.observe("layers.0")
    bent = layer.weight("layers.0.mlp.down_proj.weight") * 0.5
    layer.replace("layers.0.mlp.down_proj.weight", bent)
    assert layer.weight("layers.0.mlp.down_proj.weight") is bent
    layer.fake_input("layers.0.self_attn.o_proj", lambda x: x * 3)
    saved = [product.weight.clone() for product in products]
    with torch.no_grad():
        if propagate:
            products[0].weight.mul_(3)
            products[1].weight.mul_(0.5)
        expected = seen_by_huggingface(model, 1)
        for product, weight in zip(products, saved, strict=True):
            product.weight.copy_(weight)
    walk.advance(layer)
    for name, kept in walk.observe("layers.1").inputs.items():
        torch.testing.assert_close(kept.x, expected[name], rtol=1e-4, atol=1e-4)


def test_one_layer_s_weights_are_held_at_a_time(tiny: tuple[PreTrainedModel, Path]) -> None:
    decoder, load = opened(tiny[1])
    loaded: dict[str, weakref.ref[torch.Tensor]] = {}

    def watched(name: str) -> torch.Tensor:
        tensor = load(name).clone()
        loaded[name] = weakref.ref(tensor)
        return tensor

    for layer in layers_of(Walk(decoder, watched, SAMPLES, CPU, Kept, propagate=True)):
        alive = {name for name, tensor in loaded.items() if tensor() is not None}
        assert alive
        assert all(name.startswith(f"{layer.name}.") for name in alive)


def test_refusals(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path)
    decoder, load = opened(tmp_path)
    run = partial(Walk, decoder, load, device=CPU, statistic=Kept)
    with pytest.raises(ConfigError, match="nothing to calibrate with"):
        run(samples=[])
    with pytest.raises(ConfigError, match=r"sample 2 has an invalid length; seen: 65; allowed: 1 to 64"):
        run(samples=[[1], [1] * 65])
    with pytest.raises(ConfigError, match=r"sample 1 has a token.*seen: 97; allowed: 0 to 96"):
        run(samples=[[3, 97]])
    layer = run(samples=[[1, 2]]).observe("layers.0")
    with pytest.raises(ConfigError, match="a different shape"):
        layer.replace("layers.0.mlp.down_proj.weight", torch.ones(2))
    with pytest.raises(ConfigError, match="no such linear layer"):
        layer.fake_input("layers.1.mlp.down_proj", lambda x: x)
    broken = lambda name: load(name) * (torch.nan if "down" in name else 1)  # noqa: E731
    with pytest.raises(BuildError, match=r"not finite during calibration; seen: layers\.0"):
        Walk(decoder, broken, [[1, 2]], CPU, Kept).observe("layers.0")
