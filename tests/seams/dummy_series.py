"""A model of series: a LLaMA whose prompts may hold a series, encoded by two linear layers around a GELU.

Covers its architecture and the same mathematics in plain PyTorch for proofs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ingot.checkpoint.weight_map import Rename, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.layers.build_context import BuildContext
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.linear import Linear
from ingot.models.architecture import Architecture, LayerRange
from ingot.models.hf_values import HfConfig, integer
from ingot.models.llama import LLAMA_KEYS, llama_config, llama_weight_map
from ingot.models.model_registry import register
from ingot.reference.plain_layer import Hooks, ReadVector
from ingot.reference.plain_stage import LayerShape, Stage
from tests.seams.dummy_modality import SERIES

NAME, CLASS = "dummy-series", "DummySeries"
KEYS = ("series_channels", "series_width", "series_steps", "series_token")
PARTS = ("encoder.first", "encoder.second")


class SeriesEncoder(nn.Module):
    """[N, C] → [N, hidden_size]."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.encoder is not None
        width, self.longest = config.encoder.settings["width"], _longest(config.encoder)
        self.first = Linear(self.longest[1], width, bias=True, ctx=ctx.at("first"))
        self.second = Linear(width, config.hidden_size, bias=True, ctx=ctx.at("second"))

    def positions(self, shape: tuple[int, ...]) -> int:
        """Of an input: one a step."""
        return shape[0]

    def forward(self, features: torch.Tensor, forward_pass: EncoderPass) -> torch.Tensor:
        """Of one series, or of several of one length."""
        hidden = features.reshape(-1, features.shape[-1])
        encoded: torch.Tensor = self.second(F.gelu(self.first(hidden)))
        return encoded


def _longest(encoder: EncoderConfig) -> tuple[int, ...]:
    return encoder.max_positions, encoder.features[1]


@dataclass(frozen=True)
class PlainSeriesEncoder:
    """The same as two stages."""

    around: tuple[str, ...] = PARTS
    first: tuple[str, str] = (PARTS[0], "encoder.features")

    def shape_of(self, layer: str) -> LayerShape | None:
        """Neither is a layer of a stack."""
        return None

    def stages(self, read: ReadVector, hooks: Hooks) -> list[Stage]:
        """Both have linear layers."""
        return [Stage(name, "bridge", partial(_run, name, hooks)) for name in PARTS]


def _run(name: str, hooks: Hooks, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if name == PARTS[1]:
        hidden = hooks.round(hooks.bend(hidden, "gelu"))
    output = hooks.recorded(name, hooks.product(name, hooks.recorded(f"{name}/in", hidden)))
    hooks.see(name, output)
    return output


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json → DecoderConfig."""
    text = llama_config(hf, NAME)
    channels, width, steps, token = (integer(hf, key) for key in KEYS)
    encoder = EncoderConfig(
        text.hidden_size,
        steps,
        (0, channels),
        width + text.hidden_size,
        SERIES.name,
        placeholder_id=token,
        settings={"width": width},
    )
    return text.replace(wiring="prefix", encoder=encoder)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """LLaMA's names, and the encoder's."""
    text = llama_weight_map(config, layers)
    own = [Rename(f"{part}.{kind}", f"{part}.{kind}") for part in PARTS for kind in ("weight", "bias")]
    return replace(text, rules=(*text.rules, *own))


DUMMY = Architecture(
    NAME,
    (CLASS,),
    NAME,
    LLAMA_KEYS | set(KEYS),
    config_from_hf,
    weight_map,
    SeriesEncoder,
    plain_encoder=lambda config: PlainSeriesEncoder(),
)


def register_dummy() -> None:
    """Make the architecture known."""
    register(DUMMY)
