"""The encoder input that both sides of a comparison get, and Hugging Face's Whisper called with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ingot.building.golden.golden_encoder import GoldenInput
from ingot.measure.align.stages.stage_names import LOG_MEL


@dataclass(frozen=True, eq=False)
class Given:
    """An input, and its features as the original computes them and the encoder takes them."""

    source: GoldenInput
    features: torch.Tensor

    @property
    def stage(self) -> str:
        return self.source.features_name.replace("-", "_")


class WhisperByIds(nn.Module):
    """Whisper called as a text model is, with token ids alone: it encodes the speech at the first call."""

    def __init__(self, inner: Any, given: Given) -> None:
        super().__init__()
        self.inner = inner
        self.given = given
        self._shown = given.features
        self._encoded: Any = None
        self.add_module(LOG_MEL, nn.Identity())  # so that a trace has the features

    @property
    def generation_config(self) -> Any:
        return self.inner.generation_config

    @property
    def config(self) -> Any:
        return self.inner.config

    @property
    def _supports_sdpa(self) -> bool:
        return bool(self.inner._supports_sdpa)

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)

    def as_noise(self, *, noise: bool) -> None:
        """The features in a trace: with noise those that a sound preparation may round otherwise."""
        self._shown = self.given.source.nearly if noise else self.given.features

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        if past_key_values is None:
            encoder = self.inner.get_encoder()
            weight = encoder.conv1.weight
            self.get_submodule(LOG_MEL)(self._shown.T)
            with torch.backends.cudnn.flags(enabled=False):  # whose convolutions round fp32 to TF32
                self._encoded = encoder(self.given.features.to(weight.device, weight.dtype)[None])
        return self.inner(
            encoder_outputs=self._encoded,
            decoder_input_ids=input_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
