"""The stages of encoders: their names, what each reads, and where the checking encoder computes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import PICTURE, SPEECH
from ingot.engine.reference_encoder import stage_names
from ingot.errors import ConfigError
from ingot.measure.align.stages.stage_names import CONVS, FEATURES
from ingot.models.model_registry import plain_encoder
from ingot.reference.plain_stage import PlainEncoder

# The stage of the features, and the one that the decoder reads, by modality.
_ENDS = {SPEECH: (FEATURES[0], "encoder.final_norm"), PICTURE: (FEATURES[1], "encoder.ln_vision")}
_PRE_NORM = {
    "attended": "input_norm",
    "attention": "attended",
    "residual": "attention",
    "post_norm": "residual",
    "inner": "post_norm",
    "mlp": "inner",
    "output": "mlp",
}
_POST_NORM = {
    "attention": "attended",
    "residual": "attention",
    "cross_norm": "residual",
    "cross_attended": "cross_norm",
    "cross_attention": "cross_attended",
    "cross_residual": "cross_attention",
    "inner": "post_norm",
    "mlp": "inner",
    "mlp_residual": "mlp",
    "output": "mlp_residual",
}
_LAYER = re.compile(r"encoder\.(\w+\.)?layers\.\d+")


@dataclass(frozen=True)
class EncoderStages:
    """The stages of a model's encoder; cross-attention reads the one in ``kept``."""

    config: DecoderConfig
    plain: PlainEncoder
    features: str
    kept: str

    @classmethod
    def of(cls, config: DecoderConfig) -> EncoderStages | None:
        """None for a model without an encoder.

        Raises:
            ConfigError: the stages of its modality have no names here.
        """
        plain = plain_encoder(config)
        if plain is None:
            return None
        names = _ENDS.get(config.modality)
        if names is None:
            raise ConfigError(
                "`ingot align` cannot compare this model's encoder",
                seen=config.modality.name,
                allowed=[one.name for one in _ENDS],
                fix="`ingot verify` checks it without its original",
            )
        return cls(config, plain, *names)

    @cached_property
    def layers(self) -> list[str]:
        return [name for name in stage_names(self.config) if _LAYER.fullmatch(name)]

    def as_features(self, rows: torch.Tensor) -> torch.Tensor:
        """Features as the encoder takes them, of the rows in a file."""
        return rows.T if self.features == FEATURES[0] else rows.unflatten(0, (3, -1))

    def layer_of(self, stage: str) -> str | None:
        found = _LAYER.match(stage)
        return None if found is None else found[0]

    def post_norm(self, layer: str) -> bool:
        """Whether norms follow sums."""
        shape = self.plain.shape_of(layer)
        return shape is not None and shape.post_norm

    def crosses(self, layer: str) -> bool:
        """Whether a layer has cross-attention."""
        shape = self.plain.shape_of(layer)
        return shape is not None and shape.crosses

    def before(self, layer: str) -> str:
        """The stage that a layer reads."""
        stack = layer.rpartition(".")[0]
        own = [one for one in self.layers if one.startswith(f"{stack}.")]
        place = own.index(layer)
        return f"{own[place - 1]}.output" if place else f"{stack.rpartition('.')[0]}.embedding"

    def source(self, stage: str) -> str:
        """The stage that a stage's module reads."""
        layer, kind = self.layer_of(stage), stage.rpartition(".")[2]
        if layer is None:
            return self._around()[stage]
        if kind in ("cross_keys", "cross_values"):
            return self.kept
        if not self.post_norm(layer):
            return self.before(layer) if kind == "input_norm" else f"{layer}.{_PRE_NORM[kind]}"
        if kind == "attended":
            return self.before(layer)
        if kind == "post_norm":
            return f"{layer}.{'cross_residual' if self.crosses(layer) else 'residual'}"
        return f"{layer}.{_POST_NORM[kind]}"

    def stream(self, stage: str) -> str:
        """The stage to which a sum adds its branch."""
        layer, kind = self.layer_of(stage), stage.rpartition(".")[2]
        assert layer is not None
        if kind == "residual":
            return self.before(layer)
        if self.post_norm(layer):
            return f"{layer}.{'cross_norm' if kind == 'cross_residual' else 'post_norm'}"
        return f"{layer}.residual"

    def group(self, stage: str) -> str:
        """The checking encoder's stage in which a stage is computed."""
        layer = self.layer_of(stage)
        if layer is not None:
            return layer
        groups = {"encoder.final_norm": "encoder.norm", "encoder.qformer.embedding": "encoder.qformer.norm"}
        if stage in ("encoder.ln_vision", "encoder.projector"):
            return stage
        return groups.get(stage, self.plain.first[1])

    def taken(self, group: str) -> str:
        """The stage that a group begins with."""
        if group == self.plain.first[1]:
            return self.features
        if _LAYER.fullmatch(group):
            return self.before(group)
        return self._around()[group]

    def _around(self) -> dict[str, str]:
        """The sources of stages outside the layers."""
        vit = [one for one in self.layers if one.startswith("encoder.vit.")]
        last = f"{self.layers[-1]}.output"
        if not vit:
            return {
                CONVS[0]: self.features,
                CONVS[1]: CONVS[0],
                "encoder.embedding": CONVS[1],
                "encoder.final_norm": last,
                "encoder.norm": last,
            }
        return {
            "encoder.vit.patch_embedding": self.features,
            "encoder.vit.embedding": "encoder.vit.patch_embedding",
            "encoder.ln_vision": f"{vit[-1]}.output",
            "encoder.qformer.embedding": self.kept,  # not read: its queries are learned
            "encoder.qformer.norm": self.kept,
            "encoder.projector": self.kept if self.layers == vit else last,
        }
