"""An engine of pictures is compared with its files by published names: errors of the weight map are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ingot import build
from ingot.building.source.minigpt4_names import PictureSource
from ingot.building.source.source_check import compare_with_source
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.weight_map import Concat, Rename, SquarePositions, WeightMap
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly
from ingot.errors import BuildError, CheckpointError
from ingot.models import minigpt4
from ingot.models import model_registry as registry
from tests.vision.files import LLAMA2, TINY, Tiny, write_files

CPU = torch.device("cpu")
BERT = "qformer.Qformer.bert.encoder.layer"
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Biases of keys are zero in the ViT alone, as in the official file."""
    return write_files(tmp_path_factory.mktemp("tiny"))


def _swapped(one: str, other: str) -> Change:
    """Rules whose sources are exchanged, by a part of their names."""

    def name(source: str) -> str:
        return source.replace(one, "@").replace(other, one).replace("@", other)

    return lambda rule: replace(rule, source=name(rule.source)) if isinstance(rule, Rename) else rule


def _joined(target: str, order: tuple[int, ...]) -> Change:
    """A product whose parts are joined in another order."""

    def change(rule: Any) -> Any:
        if not isinstance(rule, Concat) or not rule.target.startswith(target):
            return rule
        return replace(rule, sources=tuple(rule.sources[place] for place in order))

    return change


def _grid(rule: Any) -> Any:
    """Patches turned: columns before rows."""
    if not isinstance(rule, SquarePositions):
        return rule

    class Turned(SquarePositions):
        def build(self, target: str, sources: Any) -> torch.Tensor:
            table = super().build(target, sources)
            square = table[1:].unflatten(0, (self.grid, self.grid)).transpose(0, 1)
            return torch.cat([table[:1], square.flatten(0, 1)])

    return Turned(rule.target, rule.source, rule.grid)


FAULTS: dict[str, tuple[Change, set[str]]] = {
    "q and k of the Q-Former": (
        _joined("encoder.qformer.layers.1.self_attn", (1, 0, 2)),
        {f"encoder.qformer.layers.1.self_attn.qkv_proj.{leaf}" for leaf in ("weight", "bias")},
    ),
    "k and v of its cross-attention": (
        _joined("encoder.qformer.layers.2.encoder_attn", (1, 0)),
        {f"encoder.qformer.layers.2.encoder_attn.kv_proj.{leaf}" for leaf in ("weight", "bias")},
    ),
    "layers of the Q-Former": (
        _swapped(f"{BERT}.0.output_query.dense", f"{BERT}.1.output_query.dense"),
        {f"encoder.qformer.layers.{i}.mlp.down_proj.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")},
    ),
    "layers of the ViT": (
        _swapped("vit.blocks.0.attn.proj", "vit.blocks.1.attn.proj"),
        {f"encoder.vit.layers.{i}.self_attn.o_proj.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")},
    ),
    "norms of a block": (
        _swapped("vit.blocks.0.norm1", "vit.blocks.0.norm2"),
        {
            f"encoder.vit.layers.0.{norm}.{leaf}"
            for norm in ("input_layernorm", "post_attention_layernorm")
            for leaf in ("weight", "bias")
        },
    ),
    "norms of the Q-Former": (
        _swapped(f"{BERT}.0.attention.output.LayerNorm", f"{BERT}.0.output_query.LayerNorm"),
        {
            f"encoder.qformer.layers.0.{norm}.{leaf}"
            for norm in ("self_attn_norm", "mlp_norm")
            for leaf in ("weight", "bias")
        },
    ),
    "weight and bias of ln_vision": (
        _swapped("qformer.ln_vision.weight", "qformer.ln_vision.bias"),
        {"encoder.ln_vision.weight", "encoder.ln_vision.bias"},
    ),
    "q and v bias of a block": (
        _joined("encoder.vit.layers.1.self_attn.qkv_proj.bias", (1, 0)),
        {"encoder.vit.layers.1.self_attn.qkv_proj.bias"},
    ),
    "positions column by column": (_grid, {"encoder.vit.embed_positions.weight"}),
}


def _plant(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight map with changed rules, wherever the architecture is looked up."""
    sound = minigpt4.weight_map

    def wrong(config: Any, layers: Any = None) -> WeightMap:
        found = sound(config, layers)
        return replace(found, rules=tuple(map(change, found.rules)))

    planted = replace(minigpt4.MINIGPT4, weight_map=wrong)
    known = tuple(planted if one is minigpt4.MINIGPT4 else one for one in registry.ARCHITECTURES)
    monkeypatch.setattr(registry, "ARCHITECTURES", known)


@pytest.mark.parametrize("quant", ["none", "w8a16"])
def test_errors_of_the_map_are_named(
    quant: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, which are of different tensors: each names its own, and no other is named."""
    changes = [change for change, _ in FAULTS.values()]
    _plant(lambda rule: reduce(lambda found, change: change(found), changes, rule), monkeypatch)
    engine = build(tiny.file, tmp_path / "engine", quant=quant, device="cpu", proof=False)
    found = {one.name for one in compare_with_source(engine, tiny.file, CPU).differences}
    missed = {fault: names - found for fault, (_, names) in FAULTS.items() if names - found}
    assert not missed
    assert found == set().union(*(names for _, names in FAULTS.values()))


def test_a_build_ends_with_it(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(FAULTS["q and k of the Q-Former"][0], monkeypatch)
    with pytest.raises(BuildError, match=r"encoder\.qformer\.layers\.1\.self_attn\.qkv_proj"):
        build(tiny.file, tmp_path / "engine", device="cpu")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("shape", "side"), [(TINY, 42), (LLAMA2, 56)], ids=["qformer", "llama2"])
def test_a_sound_engine_passes(shape: Any, side: int, tmp_path: Path) -> None:
    """Also with positions for another side, and with ``ln_vision`` of ones and zeros."""
    file = write_files(tmp_path, shape).file
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"image_size": side}))
    engine = build(file, tmp_path / "engine", device="cpu", proof=False)
    found = compare_with_source(engine, file, CPU)
    assert not found.differences
    assert not found.figures.unknown


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    file = write_files(tmp_path).file
    with open_checkpoint(file) as opened:
        config = Assembly.of(opened, BuildConfig(dtype="fp32", max_seq_len=64), QuantConfig()).model_config
    state = torch.load(file.with_name("qformer.pth"), weights_only=True)
    del state["model"]["query_tokens"]
    torch.save(state, file.with_name("qformer.pth"))
    with (
        PictureSource.open(file, config, None) as source,
        pytest.raises(CheckpointError, match=r"lacks a tensor.*query_tokens of qformer"),
    ):
        source.read("encoder.qformer", "queries")
